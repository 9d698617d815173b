#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <ranges>
#include <span>
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
          pass(untied_, nullptr);
          return sums();
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
    const auto changed = rounds_.result_or_error([&] {
      change(std::span(deltas_).first(told - 1));
      return sums();
    });
    rounds_.run_last(
        "applying the delta",
        [&](Deadline) {
          if (const Error* const failed = std::get_if<Error>(&changed)) throw *failed;
          return std::get<Bytes>(changed);
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
    find_tied();
    refuse_overlap();
  }

  static const std::string& key_of(const DeltaShard& target) { return target.sum.key; }

  // Where the elements are, on the host or a device. Without data: nobody knows, or there are none.
  static StridedView place_of(const TensorView& view) {
    if (view.bytes() == 0) return {};
    return view.device != nullptr ? view.device->place() : view.strided_view();
  }
  static std::string device_of(const TensorView& view) {
    return view.device != nullptr ? view.device->device() : "";
  }

  // Tied tensors, one memory as the same part under two keys, are changed and summed once.
  void find_tied() {
    std::map<std::tuple<std::string, std::byte*, Dims, DType, Dims, Box>, size_t> first;
    for (size_t i = 0; i < targets_.size(); ++i) {
      const auto& [sum, now, base] = targets_[i];
      const StridedView place = place_of(now);
      size_t same_as = i;
      if (place.data != nullptr) {
        same_as =
            first
                .try_emplace(
                    {device_of(now), place.data, place.strides, sum.dtype, sum.shape, sum.box}, i)
                .first->second;
      }
      if (same_as == i) {
        untied_.push_back(i);
      } else {
        tied_.emplace_back(i, same_as);
      }
    }
  }

  // Refuses memory that is shared in another way, which would be changed twice.
  void refuse_overlap() const {
    struct Held {
      std::string device;
      StridedView place;
      const std::string* key;
      const std::byte* begin() const { return reach(place).first; }
      const std::byte* end() const { return reach(place).second; }
    };
    std::vector<Held> held;
    for (const size_t i : untied_) {
      const auto& [sum, now, base] = targets_[i];
      held.push_back({device_of(now), place_of(now), &sum.key});
    }
    std::erase_if(held, [](const Held& each) { return each.place.data == nullptr; });
    std::ranges::stable_sort(held, {},
                             [](const Held& each) { return std::pair(each.device, each.begin()); });
    const Held* before = nullptr;  // that reaches furthest
    for (const Held& each : held) {
      const bool is_next = before == nullptr || before->device != each.device;
      if (!is_next && each.begin() < before->end() && !are_beside(before->place, each.place)) {
        throw Error(ErrorCode::kInvalidArgument,
                    "the tensor shares memory with " + *before->key + ", as another part or shape")
            .with_key(*each.key)
            .with_hint("pass one of them; the other changes with it");
      }
      if (is_next || each.end() > before->end()) before = &each;
    }
  }

  // The bytes that a view reaches.
  static std::pair<const std::byte*, const std::byte*> reach(const StridedView& view) {
    std::pair<const std::byte*, const std::byte*> reached{view.data, view.data + view.itemsize};
    for (size_t d = 0; d < view.shape.size(); ++d) {
      const int64_t last =
          (view.shape[d] - 1) * view.strides[d] * static_cast<int64_t>(view.itemsize);
      (last < 0 ? reached.first : reached.second) += last;
    }
    return reached;
  }

  // Views with the same steps, such as columns beside one another, reach over one another without
  // sharing elements.
  static bool are_beside(const StridedView& a, const StridedView& b) {
    return a.data != b.data && a.strides == b.strides && !a.is_contiguous() && !b.is_contiguous();
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
    DeltaFile& delta = deltas_.emplace_back(std::move(opened));
    room_ -= delta.verify(threads_, room_, [&](const DeltaTensor& tensor, const Box& box) {
      return std::ranges::any_of(std::ranges::equal_range(targets_, tensor.key, {}, key_of),
                                 [&](const DeltaShard& target) {
                                   return target.sum.dtype == tensor.dtype &&
                                          target.sum.shape == tensor.shape &&
                                          intersects(target.sum.box, box);
                                 });
    });
  }

  Bytes sums() const {
    std::vector<ShardSum> sums;
    for (const DeltaShard& target : targets_) sums.push_back(target.sum);
    return encode_sums(sums);
  }

  // Does `work` to the parts of some targets, by index, unless it is null, and sums what comes out.
  void pass(const std::vector<size_t>& some, const std::function<void(ShardPart& part)>& work) {
    for (const size_t i : some) targets_[i].sum.after = 0;
    const auto sum_part = [&](ShardPart& part) {
      if (work != nullptr) work(part);
      const ShardSum& sum = targets_[part.shard].sum;
      part.after = crc_portion(part.now, part.box, sum.shape, itemsize(sum.dtype));
    };
    const auto add = [&](ShardPart& part) { targets_[part.shard].sum.after ^= part.after; };
    walk(targets_, parts_of(targets_, some), threads_,
         {.work = sum_part, .then = add, .writes_back = work != nullptr});
    for (const auto& [i, same_as] : tied_) targets_[i].sum.after = targets_[same_as].sum.after;
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

  // Applies deltas, of which the newest is the first.
  void change(std::span<const DeltaFile> deltas) {
    const auto changed_by = [](const DeltaFile& delta, const DeltaShard& target) {
      return !delta.in_result(target.sum.key)->unchanged();
    };
    std::vector<size_t> some;
    std::ranges::copy_if(untied_, std::back_inserter(some), [&](size_t i) {
      return std::ranges::any_of(
          deltas, [&](const DeltaFile& delta) { return changed_by(delta, targets_[i]); });
    });
    pass(some, [&](ShardPart& part) {
      for (const DeltaFile& delta : std::views::reverse(deltas)) {
        delta.apply(*delta.in_result(key_of(targets_[part.shard])), part.box, part.now);
      }
    });
  }

  Rounds rounds_;
  ThreadPool threads_;
  std::vector<DeltaFile> deltas_;                // the newest first
  uint64_t room_ = DeltaFile::kMaxKept;          // for what they keep in memory
  std::optional<Error> broken_;                  // why no more of them are there
  std::vector<DeltaShard> targets_;              // by key
  std::vector<size_t> untied_;                   // indices of them
  std::vector<std::pair<size_t, size_t>> tied_;  // the others, and the untied one of each
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
