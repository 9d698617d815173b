#include <algorithm>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <variant>

#include "tilestone/base/error.h"
#include "tilestone/engine/delta/box_crc_internal.h"
#include "tilestone/engine/delta/check_internal.h"
#include "tilestone/engine/delta/live_internal.h"
#include "tilestone/engine/delta/walk_internal.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/engine/run/resources_internal.h"
#include "tilestone/engine/run/rounds_internal.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/known/known.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone::engine {
namespace {

class InPlace {
 public:
  InPlace(const DeltaCall& call, const OpenOptions& options)
      : rounds_(call.comm, "apply_delta", call.location, call.deadline),
        threads_(thread_count(options.resources.threads)) {}

  std::optional<DeltaReport> run(const std::variant<const StateDict*, Error>& made,
                                 const std::vector<Location>& deltas, bool may_be_other) {
    const Bytes answer = rounds_.run(
        "comparing with the base",
        [&](Deadline) {
          if (const Error* const failed = std::get_if<Error>(&made)) throw *failed;
          describe(*std::get<const StateDict*>(made));
          for (const Location& each : deltas) open(each);
          return own_sums();
        },
        [&](const std::vector<Bytes>& payloads) {
          const std::optional<uint64_t> count = missed(summed(payloads), may_be_other);
          ByteWriter writer;
          writer.varint(count ? *count + 1 : 0);
          return std::vector<Bytes>(payloads.size(), writer.bytes());
        });
    const uint64_t told = ByteReader(answer, "how many deltas are missed").varint();
    if (told == 0) return std::nullopt;
    const DeltaFile& newest = deltas_.front();
    DeltaReport report = report_of(newest.index());
    report.bytes = newest.bytes();
    if (told == 1) return report;
    find_equal();
    const auto changed = rounds_.result_or_error([&] {
      for (uint64_t i = told - 1; i-- > 0;) change(deltas_.at(i));
      return Bytes();
    });
    rounds_.run_last(
        "applying the delta",
        [&](Deadline) {
          if (const Error* const failed = std::get_if<Error>(&changed)) throw *failed;
          return own_sums();
        },
        [&](const std::vector<Bytes>& payloads) {
          expect_result(newest, summed(payloads));
          return std::vector<Bytes>();
        });
    return report;
  }

 private:
  void describe(const StateDict& state) {
    const StateDict plain = is_plain(state) ? state : drop_nonpersistent(build_factories(state));
    for (const TensorItem& item :
         pytorch_dialect()->to_items(plain, *format_named("torch_dist")).tensors) {
      for (const Piece& piece : item.pieces) {
        if (!piece.data.has_data()) {
          throw Error(ErrorCode::kInvalidArgument, "the tensor has no memory").with_key(item.key);
        }
        targets_.push_back({{item.key, item.dtype, item.global_shape, piece.box}, piece.data});
      }
    }
    std::ranges::stable_sort(targets_, {}, key_of);
    refuse_overlap();
    for (size_t i = 0; i < targets_.size(); ++i) unsummed_.insert(i);
  }

  static const std::string& key_of(const DeltaShard& target) { return target.sum.key; }

  // The bytes that a view in host memory reaches.
  static std::pair<const std::byte*, const std::byte*> reach(const TensorView& view) {
    std::pair reached{view.data, view.data + itemsize(view.dtype)};
    for (size_t d = 0; d < view.shape.size(); ++d) {
      const int64_t last = (view.shape[d] - 1) * view.strides[d];
      (last < 0 ? reached.first : reached.second) +=
          last * static_cast<int64_t>(itemsize(view.dtype));
    }
    return reached;
  }

  // Tied tensors, one memory as the same part under two keys, are changed once. Memory that is
  // shared in another way would be changed twice. Views with the same steps, such as columns beside
  // one another, reach over one another without sharing elements.
  void refuse_overlap() const {
    std::vector<const DeltaShard*> held;
    for (const DeltaShard& target : targets_) {
      if (target.now.device == nullptr && target.now.bytes() > 0) held.push_back(&target);
    }
    std::ranges::stable_sort(held, {},
                             [](const DeltaShard* each) { return reach(each->now).first; });
    const DeltaShard* before = nullptr;  // that reaches furthest
    for (const DeltaShard* const each : held) {
      const TensorView& now = each->now;
      const bool overlaps = before != nullptr && reach(now).first < reach(before->now).second;
      if (overlaps && !is_tied(*before, *each) && !are_beside(before->now, now)) {
        throw Error(ErrorCode::kInvalidArgument, "the tensor shares memory with " +
                                                     before->sum.key + ", as another part or shape")
            .with_key(each->sum.key)
            .with_hint("pass one of them; the other changes with it");
      }
      if (before == nullptr || reach(now).second > reach(before->now).second) before = each;
    }
  }

  static bool is_tied(const DeltaShard& a, const DeltaShard& b) {
    return a.now.data == b.now.data && a.now.strides == b.now.strides &&
           a.sum.dtype == b.sum.dtype && a.sum.shape == b.sum.shape && a.sum.box == b.sum.box;
  }

  static bool are_beside(const TensorView& a, const TensorView& b) {
    return a.data != b.data && a.strides == b.strides && !a.strided_view().is_contiguous() &&
           !b.strided_view().is_contiguous();
  }

  // Opens a delta and checks what this rank needs of it. Those before a break in the chain are not
  // looked at.
  void open(const Location& location) {
    if (broken_) return;
    DeltaFile opened = DeltaFile::open(location, rounds_.deadline());
    if (!deltas_.empty() && deltas_.back().index().base != opened.index().result) {
      broken_ =
          Error(ErrorCode::kMismatch, "the delta does not lead to the base of the one after it")
              .with_file(opened.describe());
      return;
    }
    const DeltaFile& delta = deltas_.emplace_back(std::move(opened));
    delta.verify(threads_, [&](const DeltaTensor& tensor, const Box& box) {
      return std::ranges::any_of(std::ranges::equal_range(targets_, tensor.key, {}, key_of),
                                 [&](const DeltaShard& target) {
                                   return target.sum.dtype == tensor.dtype &&
                                          target.sum.shape == tensor.shape &&
                                          intersects(target.sum.box, box);
                                 });
    });
  }

  Bytes own_sums() {
    const std::vector<uint32_t> now = portions({unsummed_.begin(), unsummed_.end()});
    for (const size_t i : unsummed_) targets_[i].sum.after = now[i];
    unsummed_.clear();
    std::vector<ShardSum> sums;
    for (const DeltaShard& target : targets_) sums.push_back(target.sum);
    return encode_sums(sums);
  }

  // Of some targets as they are now, by index: their portions of the tensors' CRC-32s.
  std::vector<uint32_t> portions(const std::vector<size_t>& some) {
    std::vector<uint32_t> found(targets_.size());
    const auto work = [&](ShardPart& part) {
      const ShardSum& sum = targets_[part.shard].sum;
      part.after = crc_portion(part.now, part.box, sum.shape, itemsize(sum.dtype));
    };
    walk(targets_, parts_of(targets_, some), threads_,
         {.work = work, .then = [&](ShardPart& part) { found[part.shard] ^= part.after; }});
    return found;
  }

  static SummedTensors summed(const std::vector<Bytes>& payloads) {
    SummedTensors sums;
    for (size_t rank = 0; rank < payloads.size(); ++rank) {
      const int number = static_cast<int>(rank);
      add_sums(sums, decode_sums(payloads[rank], number), number);
    }
    expect_covered(sums);
    return sums;
  }

  // How many of the deltas lead from these tensors to the newest version. If they are those of no
  // base: nullopt, or Error(kMismatch).
  std::optional<uint64_t> missed(const SummedTensors& sums, bool may_be_other) const {
    const DeltaFile& newest = deltas_.front();
    std::vector<TensorSum> tensors;
    for (const auto& [key, sum] : sums) {
      tensors.push_back({key, sum.dtype, sum.shape, sum.crc32()});
    }
    const std::string id = state_id(std::move(tensors));
    if (id == newest.index().result) return 0;
    for (size_t i = 0; i < deltas_.size(); ++i) {
      if (id != deltas_[i].index().base) continue;
      for (size_t j = 0; j <= i; ++j) expect_same_keys(deltas_[j], sums);
      return i + 1;
    }
    if (may_be_other && broken_) throw *broken_;
    if (may_be_other) return std::nullopt;
    expect_base(newest, sums);
    fail_base(newest, "", "the id is " + id);
  }

  static void expect_same_keys(const DeltaFile& delta, const SummedTensors& sums) {
    for (const DeltaTensor& tensor : delta.index().tensors) {
      if (tensor.before && tensor.after) continue;
      throw Error(ErrorCode::kMismatch,
                  "the delta adds, removes or reshapes a tensor, which can't be done in place")
          .with_key(tensor.key)
          .with_file(delta.describe())
          .with_hint("apply it to a checkpoint, and load that");
    }
    expect_keys(delta, sums);
  }

  // Targets that are equal to an earlier one may be tied to it, and must not get an XOR twice. On a
  // device there is no address to see that by.
  void find_equal() {
    std::set<std::tuple<DType, Dims, Box, uint32_t>> seen;
    for (const auto& [sum, now, base] : targets_) {
      may_be_tied_.push_back(!seen.emplace(sum.dtype, sum.shape, sum.box, sum.after).second);
    }
  }

  void change(const DeltaFile& delta) {
    std::vector<size_t> first, equal;
    for (size_t i = 0; i < targets_.size(); ++i) {
      if (delta.in_result(targets_[i].sum.key)->unchanged()) continue;
      unsummed_.insert(i);
      (may_be_tied_[i] ? equal : first).push_back(i);
    }
    const std::vector<uint32_t> before = portions(equal);
    apply_to(targets_, first, delta, threads_);
    for (const size_t i : equal) {  // what has changed with another one is tied to it
      if (portions({i})[i] == before[i]) apply_to(targets_, {i}, delta, threads_);
    }
  }

  Rounds rounds_;
  ThreadPool threads_;
  std::vector<DeltaFile> deltas_;    // the newest first
  std::optional<Error> broken_;      // why no more of them are there
  std::vector<DeltaShard> targets_;  // by key
  std::vector<bool> may_be_tied_;
  std::set<size_t> unsummed_;  // those whose sums are not of what they are now
};

}  // namespace

std::optional<DeltaReport> apply_in_place(const DeltaCall& call,
                                          const std::variant<const StateDict*, Error>& made,
                                          const std::vector<Location>& deltas,
                                          const OpenOptions& options, bool may_be_other) {
  if (deltas.empty()) throw Error(ErrorCode::kInternal, "no delta is applied");
  return InPlace(call, options).run(made, deltas, may_be_other);
}

}  // namespace tilestone::engine
