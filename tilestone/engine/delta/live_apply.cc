#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <variant>

#include "tilestone/base/error.h"
#include "tilestone/engine/delta/box_crc_internal.h"
#include "tilestone/engine/delta/chain_internal.h"
#include "tilestone/engine/delta/compare_internal.h"
#include "tilestone/engine/delta/live_internal.h"
#include "tilestone/engine/delta/versions_internal.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/engine/run/resources_internal.h"
#include "tilestone/engine/run/rounds_internal.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/known/known.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone::engine {
namespace {

struct Target {
  ShardSum sum;
  TensorView memory;
  bool summed = false;       // since it was changed
  bool may_be_tied = false;  // an earlier target is equal to it
  bool tied = false;         // it shares its memory with an earlier one, and changes with that
};

class InPlace {
 public:
  InPlace(const DeltaCall& call, const OpenOptions& options)
      : rounds_(call.comm, "apply_delta", call.location, call.deadline),
        threads_(thread_count(options.resources.threads)) {}

  AppliedDelta run(const std::variant<const StateDict*, Error>& made,
                   const std::vector<Location>& deltas, const std::optional<Location>& whole) {
    const Bytes answer = rounds_.run(
        "comparing with the base",
        [&](Deadline) {
          if (const Error* const failed = std::get_if<Error>(&made)) throw *failed;
          describe(*std::get<const StateDict*>(made));
          for (const Location& each : deltas) open(each);
          return own_sums();
        },
        [&](const std::vector<Bytes>& payloads) {
          const std::optional<uint64_t> count = missed(summed(payloads), whole);
          ByteWriter writer;
          writer.varint(count ? *count + 1 : 0);
          return std::vector<Bytes>(payloads.size(), writer.bytes());
        });
    const uint64_t told = ByteReader(answer, "how many deltas are missed").varint();
    const DeltaFile& newest = deltas_.front();
    AppliedDelta applied{report_of(newest.index()), std::nullopt};
    applied.report.bytes = newest.bytes();
    if (told == 0) return applied;
    const uint64_t count = told - 1;
    applied.applied = count;
    if (count == 0) return applied;
    find_equal();
    const auto changed = rounds_.result_or_error([&] {
      for (uint64_t i = count; i-- > 0;) change(deltas_.at(i));
      return Bytes();
    });
    rounds_.run_last(
        "applying the delta",
        [&](Deadline) {
          if (const Error* const failed = std::get_if<Error>(&changed)) throw *failed;
          return own_sums();
        },
        [&](const std::vector<Bytes>& payloads) {
          const SummedTensors sums = summed(payloads);
          for (const DeltaTensor& tensor : newest.index().tensors) {
            expect_result(newest, tensor, sums.find(tensor.key)->second.crc32());
          }
          return std::vector<Bytes>();
        });
    return applied;
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
  }

  static const std::string& key_of(const Target& target) { return target.sum.key; }

  // The bytes that a view in host memory reaches.
  static std::pair<const std::byte*, const std::byte*> reach(const TensorView& view) {
    std::pair reached{view.data, view.data + itemsize(view.dtype)};
    for (size_t d = 0; d < view.shape.size(); ++d) {
      const int64_t last = (view.shape[d] - 1) * view.strides[d];
      (last < 0 ? reached.first : reached.second) += last * static_cast<int64_t>(itemsize(view.dtype));
    }
    return reached;
  }

  // Tied tensors, one memory as the same part under two keys, are changed once. Memory that is
  // shared in another way would be changed twice. Views with the same steps, such as columns beside
  // one another, reach over one another without sharing elements.
  void refuse_overlap() const {
    std::vector<const Target*> held;
    for (const Target& target : targets_) {
      if (target.memory.device == nullptr && target.memory.bytes() > 0) held.push_back(&target);
    }
    std::ranges::stable_sort(held, {}, [](const Target* each) { return reach(each->memory).first; });
    const Target* before = nullptr;  // that reaches furthest
    for (const Target* const each : held) {
      const TensorView& now = each->memory;
      const bool overlaps = before != nullptr && reach(now).first < reach(before->memory).second;
      if (overlaps && !is_tied(*before, *each) && !are_beside(before->memory, now)) {
        throw Error(ErrorCode::kInvalidArgument,
                    "the tensor shares memory with " + before->sum.key + ", as another part or shape")
            .with_key(each->sum.key)
            .with_hint("pass one of them; the other changes with it");
      }
      if (before == nullptr || reach(now).second > reach(before->memory).second) before = each;
    }
  }

  static bool is_tied(const Target& a, const Target& b) {
    return a.memory.data == b.memory.data && a.memory.strides == b.memory.strides &&
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
      return std::ranges::any_of(
          std::ranges::equal_range(targets_, tensor.key, {}, key_of), [&](const Target& target) {
            return target.sum.dtype == tensor.dtype && target.sum.shape == tensor.shape &&
                   intersects(target.sum.box, box);
          });
    });
  }

  Bytes own_sums() {
    std::vector<ShardSum> sums;
    for (Target& target : targets_) {
      ShardSum& sum = target.sum;
      if (!std::exchange(target.summed, true)) {
        sum.after = portion_of(target.memory, sum.box, sum.shape, threads_);
      }
      sums.push_back(sum);
    }
    return encode_sums(sums);
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
  // base: nullopt if all the deltas lead from the `whole` version, with these keys, to the newest
  // one; otherwise Error(kMismatch).
  std::optional<uint64_t> missed(const SummedTensors& sums,
                                 const std::optional<Location>& whole) const {
    const DeltaFile& newest = deltas_.front();
    if (is_version(newest, sums, &DeltaTensor::after)) return 0;
    for (size_t i = 0; i < deltas_.size(); ++i) {
      if (!is_version(deltas_[i], sums, &DeltaTensor::before)) continue;
      for (size_t j = 0; j <= i; ++j) expect_same_keys(deltas_[j], sums);
      return i + 1;
    }
    if (whole && broken_) throw *broken_;
    for (const DeltaFile& delta : deltas_) {
      expect_same_keys(delta, sums);
      if (!whole) break;
    }
    if (whole) {
      expect_leads_on(*whole, deltas_.back());
      return std::nullopt;
    }
    for (const DeltaTensor& tensor : newest.index().tensors) {
      expect_base(newest, tensor, sums.find(tensor.key)->second.crc32());
    }
    fail_base(newest, "", "some of its tensors are those of the new version");
  }

  static bool is_version(const DeltaFile& delta, const SummedTensors& sums,
                         std::optional<uint32_t> DeltaTensor::* crc) {
    size_t known = 0;
    for (const DeltaTensor& tensor : delta.index().tensors) {
      if (!(tensor.*crc)) continue;
      const auto found = sums.find(tensor.key);
      if (found == sums.end()) return false;
      const SummedTensor& has = found->second;
      if (has.dtype != tensor.dtype || has.shape != tensor.shape) return false;
      if (has.crc32() != tensor.*crc) return false;
      ++known;
    }
    return known == sums.size();
  }

  static void expect_same_keys(const DeltaFile& delta, const SummedTensors& sums) {
    for (const DeltaTensor& tensor : delta.index().tensors) {
      const auto found = sums.find(tensor.key);
      if (found == sums.end()) fail_base(delta, tensor.key, "the tensor is not there");
      if (!tensor.before || !tensor.after) {
        throw Error(ErrorCode::kMismatch,
                    "the delta adds, removes or reshapes a tensor, which can't be done in place")
            .with_key(tensor.key)
            .with_file(delta.describe())
            .with_hint("apply it to a checkpoint, and load that");
      }
      const SummedTensor& has = found->second;
      if (has.dtype == tensor.dtype && has.shape == tensor.shape) continue;
      fail_base(
          delta, tensor.key,
          fmt::format("the tensor is {} {}, and {} {} in the delta's base", to_string(has.dtype),
                      to_string(has.shape), to_string(tensor.dtype), to_string(tensor.shape)));
    }
    for (const auto& [key, has] : sums) {
      if (delta.in_result(key) != nullptr) continue;
      fail_base(delta, key, "the delta's base has no such tensor");
    }
  }

  void change(const DeltaFile& delta) {
    for (Target& target : targets_) {
      const DeltaTensor& tensor = *delta.in_result(target.sum.key);
      if (tensor.unchanged()) continue;
      target.summed = false;
      try {
        change_once(target, delta, tensor);
      } catch (Error& error) {
        error.with_key(tensor.key);
        throw;
      }
    }
  }

  // Tied tensors are one memory under two keys, which must not get an XOR twice. On a device there
  // is no address to see that by, but equal tensors of which one changes with the other are tied.
  void find_equal() {
    std::set<std::tuple<DType, Dims, Box, uint32_t>> seen;
    for (Target& target : targets_) {
      const ShardSum& sum = target.sum;
      target.may_be_tied = !seen.emplace(sum.dtype, sum.shape, sum.box, sum.after).second;
    }
  }

  void change_once(Target& target, const DeltaFile& delta, const DeltaTensor& tensor) {
    const auto is_as_it_was = [&] {
      const ShardSum& sum = target.sum;
      return portion_of(target.memory, sum.box, sum.shape, threads_) == sum.after;
    };
    if (!target.tied && target.may_be_tied) target.tied = !is_as_it_was();
    if (target.tied) return;
    change(target, delta, tensor);
    if (target.may_be_tied) target.may_be_tied = is_as_it_was();
  }

  void change(const Target& target, const DeltaFile& delta, const DeltaTensor& tensor) {
    const TensorView& memory = target.memory;
    const Box& box = target.sum.box;
    const bool is_plain_memory = memory.device == nullptr && memory.strided_view().is_contiguous();
    if (is_plain_memory) {
      return delta.apply(tensor, box, {memory.data, memory.bytes()}, threads_);
    }
    const uint64_t item = itemsize(tensor.dtype);
    const std::vector<Box> parts = pieces_of(box, item);
    threads_.parallel_for(parts.size(), [&](size_t i) {
      Bytes copy(static_cast<uint64_t>(parts[i].numel()) * item);
      const TensorView there = memory.narrow(relative_to(parts[i], box.offset));
      const StridedView here = StridedView::contiguous(copy.data(), parts[i].shape, item);
      if (there.device != nullptr) {
        const DeviceCopy part = there.device_copy(copy);
        copy_now(CopyTo::kHost, {&part, 1});
        delta.apply(tensor, parts[i], copy, threads_);
        copy_now(CopyTo::kDevice, {&part, 1});
        return;
      }
      strided_copy(here, there.strided_view());
      delta.apply(tensor, parts[i], copy, threads_);
      strided_copy(there.strided_view(), here);
    });
  }

  Rounds rounds_;
  ThreadPool threads_;
  std::vector<DeltaFile> deltas_;  // the newest first
  std::optional<Error> broken_;    // why no more of them are there
  std::vector<Target> targets_;
};

}  // namespace

AppliedDelta apply_in_place(const DeltaCall& call,
                            const std::variant<const StateDict*, Error>& made,
                            const std::vector<Location>& deltas, const OpenOptions& options,
                            const std::optional<Location>& whole) {
  if (deltas.empty()) throw Error(ErrorCode::kInternal, "no delta is applied");
  return InPlace(call, options).run(made, deltas, whole);
}

}  // namespace tilestone::engine
