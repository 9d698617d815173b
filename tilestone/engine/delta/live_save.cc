// The protocol of a delta that ranks save together:
//
// 1. The ranks agree who writes which box, as for a save, but begin no transaction.
// 2. Each compares its boxes with the base in its memory, and writes what has changed into a file
//    whose name has the save's id. The file is durable before the rank reports.
// 3. The coordinator merges the reports into the index. If a rank has failed until then, every rank
//    removes its file.
// 4. The coordinator puts the index, if none is there: the delta exists. From here on no rank
//    removes its file, because a put that has failed may have been done all the same.
// 5. Each rank makes the base in its memory the new version.
//
// A crash before 4 leaves files that no index names; the next delta there removes them after its 4,
// a whole version before it is saved.
// A crash between 4 and 5 loses the base with the process; the next version is then a whole one.

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>
#include <variant>

#include "tilestone/base/both_ways.h"
#include "tilestone/base/error.h"
#include "tilestone/base/or_log.h"
#include "tilestone/engine/convert/stored_source_internal.h"
#include "tilestone/engine/delta/box_crc_internal.h"
#include "tilestone/engine/delta/delta_file_internal.h"
#include "tilestone/engine/delta/live_internal.h"
#include "tilestone/engine/delta/versions_internal.h"
#include "tilestone/engine/delta/walk_internal.h"
#include "tilestone/engine/run/resources_internal.h"
#include "tilestone/engine/save/by_rounds_internal.h"

namespace tilestone::engine {
namespace {

// As in base/both_ways.h.
void walk_report(auto& io, auto& report) {
  both::text(io, report.base);
  both::text(io, report.result);
  both::varint(io, report.unchanged);
  both::varint(io, report.changed);
  both::varint(io, report.added);
  both::varint(io, report.bytes);
  both::varint(io, report.whole_bytes);
}

// The boxes that the ranks have agreed this one writes.
std::vector<DeltaShard> shards_of(const SaveShare& share) {
  std::vector<DeltaShard> all, written;
  for (const TensorItem& item : share.items.tensors) {
    for (const Piece& piece : item.pieces) {
      ShardSum sum{item.key, item.dtype, item.global_shape, piece.box};
      all.push_back({std::move(sum), piece.data});
    }
  }
  for (const uint32_t chunk : share.assignment.chunks) written.push_back(all.at(chunk));
  return written;
}

void refuse_objects(const Items& items) {
  const std::string* key = items.objects.empty() ? nullptr : &items.objects.front().key;
  if (key == nullptr) return;
  throw Error(ErrorCode::kInvalidArgument, "a delta has only tensors, and this is an object")
      .with_key(*key)
      .with_hint("give only the tensors of the state");
}

class LiveDelta {
 public:
  LiveDelta(const DeltaCall& call, DeltaBase& base, bool writes)
      : base_(base),
        writes_(writes),
        saving_(call.comm, writes ? "save_delta" : "keep_base", call.location, call.deadline) {
    saving_.publishes = false;
    if (!writes) base = {};
  }

  DeltaReport run(const MadeRequest& request, const std::optional<Location>& from) {
    plan_step(saving_, request, nullptr);
    const Resources& resources = saving_.planned.share.options.resources;
    threads_.emplace(thread_count(resources.threads));
    saving_.rounds.run(
        "reading the base", [&](Deadline) { return prepare(from), Bytes(); },
        [&](std::vector<Bytes>) {
          expect_free();
          return std::vector<Bytes>();
        });
    const auto made = saving_.rounds.result_or_error([&] { return make(); });
    Bytes answer;
    try {
      answer = report(made);
    } catch (...) {
      if (has_file_ && Rounds::reached_all(current_error())) remove_own();
      throw;
    }
    if (writes_) publish();
    if (saving_.rounds.comm().is_coordinator()) remove_leftovers();
    try {
      return finish(answer);
    } catch (...) {
      base_ = {};  // it is neither version
      throw;
    }
  }

 private:
  Storage& storage() { return *saving_.planned.location; }
  const SaveShare& share() const { return saving_.planned.share; }

  void prepare(const std::optional<Location>& from) {
    if (writes_ && !from && base_.id.empty()) {
      throw Error(ErrorCode::kInvalidArgument,
                  "the base is lost: an earlier call failed here after its version was complete")
          .with_hint("save a whole version, or give the base as the path of a checkpoint");
    }
    refuse_objects(share().items);
    shards_ = shards_of(share());
    if (from) read_base(*from);
    sums_base_ = from.has_value();
    for (DeltaShard& shard : shards_) {
      const auto found = base_.parts.find({shard.sum.key, shard.sum.box});
      if (found == base_.parts.end() || found->second.memory.dtype != shard.sum.dtype) continue;
      shard.base = found->second.memory;
      shard.sum.before = found->second.portion;
      shard.sum.has_base = true;
    }
  }

  // The portions are found out when it is compared.
  void read_base(const Location& from) {
    expect_no_delta(from);
    OpenOptions options;
    options.resources = share().options.resources;
    const auto source = StoredSource::open(from, options);
    base_ = {};
    std::vector<TensorItem> items;
    for (const auto& [sum, now, base] : shards_) {
      const StoredTensor* const stored = source->metadata().find_tensor(sum.key);
      if (stored == nullptr || stored->dtype != sum.dtype || stored->shape != sum.shape) continue;
      TensorItem& item = items.emplace_back();
      item.key = sum.key;
      item.dtype = sum.dtype;
      item.global_shape = sum.shape;
      item.pieces.push_back({sum.box, TensorView::allocate(sum.dtype, sum.box.shape)});
      base_.parts[{sum.key, sum.box}].memory = item.pieces.front().data;
    }
    source->read(items, false);
    for (const StoredTensor& tensor : source->metadata().tensors) {
      base_.tensors.push_back({tensor.key, tensor.dtype, tensor.shape});
    }
  }

  void expect_free() {
    if (!is_whole(storage())) return;
    throw Error(ErrorCode::kAlreadyExists, "a version is there")
        .with_file(storage().describe())
        .with_hint("save it elsewhere");
  }

  // Encodes and writes what has changed; returns the sums. Nothing is written without changes.
  Bytes make() {
    file_ = fmt::format("delta-{:05}-of-{:05}-{}.safetensors", share().rank + 1, share().world_size,
                        share().save_id.substr(0, 8));
    DeltaBody body(nullptr, file_);
    if (writes_) {
      compare_shards(shards_, sums_base_, *threads_, [&](ShardPart& part) { take(part, body); });
    }
    copy_new();
    const DeltaEntries entries = body.entries();
    if (!entries.empty()) {
      const Bytes header = write_delta_header(entries, nullptr);
      has_file_ = true;
      body.write(storage(), file_, header, saving_.rounds.deadline());
      storage().settle("");
      bytes_ = header.size() + body.bytes();
    }
    ByteWriter writer;
    writer.u64(bytes_);
    std::vector<ShardSum> sums;
    for (const DeltaShard& shard : shards_) sums.push_back(shard.sum);
    writer.raw(encode_sums(sums));
    return std::move(writer).take();
  }

  void take(ShardPart& part, DeltaBody& body) {
    if (!part.encoded) return;
    ShardPart& change = changes_.emplace_back(std::move(part));
    if (change.is_copy && change.encoded->kind == DeltaKind::kWhole) {
      Bytes& kept = change.encoded->values;
      kept.assign(change.now.begin(), change.now.end());
      change.now = kept;
    }
    body.add(shards_[change.shard].sum, change.box, *change.encoded, change.now);
  }

  // Copies what the base lacks. If nothing is written, that is all, and it is summed, too.
  void copy_new() {
    std::vector<size_t> some;
    for (size_t i = 0; i < shards_.size(); ++i) {
      const auto& [sum, now, base] = shards_[i];
      memory_.push_back(sum.has_base ? base : TensorView::allocate(sum.dtype, sum.box.shape));
      if (!sum.has_base) some.push_back(i);
    }
    const auto copy = [&](ShardPart& part) {
      const ShardSum& sum = shards_[part.shard].sum;
      const MutableByteView to = memory_of(part.shard, part.box);
      std::copy(part.now.begin(), part.now.end(), to.begin());
      if (!writes_) part.after = crc_portion(to, part.box, sum.shape, itemsize(sum.dtype));
    };
    const auto sum = [&](ShardPart& part) { shards_[part.shard].sum.after ^= part.after; };
    walk(shards_, parts_of(shards_, some), *threads_, {.work = copy, .then = sum});
  }

  // In the base, which is contiguous.
  MutableByteView memory_of(size_t shard, const Box& box) const {
    const ShardSum& sum = shards_[shard].sum;
    const uint64_t item = itemsize(sum.dtype);
    return {memory_[shard].data + *place_if_contiguous(box, sum.box, item),
            static_cast<uint64_t>(box.numel()) * item};
  }

  Bytes report(const std::variant<Bytes, Error>& made) {
    const Rounds::LocalStep local = [&](Deadline) {
      if (const Error* const failed = std::get_if<Error>(&made)) throw *failed;
      return std::get<Bytes>(made);
    };
    const Rounds::CoordinatorStep merge = [&](const std::vector<Bytes>& payloads) {
      return std::vector<Bytes>(payloads.size(), merged(payloads));
    };
    return writes_ ? saving_.rounds.run("writing", local, merge)
                   : saving_.rounds.run_last("comparing", local, merge);
  }

  // After a failure the files stay, because the index that names them may have been written.
  void publish() {
    saving_.rounds.run_last(
        "preparing to publish", [](Deadline) { return Bytes(); },
        [&](std::vector<Bytes>) {
          storage().publish(std::string(kDeltaName), "." + share().save_id, header_, false,
                            saving_.rounds.deadline().without_interrupt());
          return std::vector<Bytes>();
        });
  }

  // Files of saves of this version that have failed.
  void remove_leftovers() noexcept {
    or_log(LogLevel::kWarning, "save_delta: a file is left", [&] {
      std::vector<std::string> files = storage().list_files("delta-");
      std::erase_if(files, [&](const std::string& file) {
        return file.find("-" + share().save_id.substr(0, 8) + ".") != std::string::npos;
      });
      storage().remove(files);
    });
  }

  // And the folder, if no other rank has a file there.
  void remove_own() noexcept {
    or_log(LogLevel::kWarning, "save_delta: a file is left", [&] {
      storage().remove(file_);
      if (const auto folder = storage().parent()) folder->storage->tidy(folder->name);
    });
  }

  DeltaReport finish(const Bytes& answer) {
    DeltaReport report;
    ByteReader reader(answer, "the outcome of a delta");
    walk_report(reader, report);
    update_base();
    base_.id = report.result;
    base_.tensors = std::move(new_tensors_);
    return report;
  }

  // On the coordinator: makes the index of all ranks' sums, and the answer to them.
  Bytes merged(const std::vector<Bytes>& payloads) {
    SummedTensors sums;
    uint64_t bytes = 0;
    for (size_t rank = 0; rank < payloads.size(); ++rank) {
      const ByteView payload(payloads[rank]);
      bytes += ByteReader(payload, "the sums of a rank").u64();
      const int number = static_cast<int>(rank);
      add_sums(sums, decode_sums(payload.subspan(sizeof bytes), number), number);
    }
    expect_covered(sums);
    OldTensors old;
    for (const TensorSum& tensor : base_.tensors) old.emplace(tensor.key, &tensor);
    std::vector<DeltaTensor> made;
    for (auto& [key, sum] : sums) {
      DeltaTensor& tensor = made.emplace_back(DeltaTensor{key, sum.dtype, sum.shape});
      tensor.after = sum.crc32();
      tensor.pieces = std::move(sum.pieces);
      if (take_kept(old, tensor, sum.has_base)) {
        tensor.before = crc_of_portions(sum.before, tensor.bytes());
      }
    }
    const DeltaIndex index = make_index(std::move(made));
    new_tensors_ = sums_after(index);
    DeltaReport report = report_of(index);
    if (!old.empty()) {
      throw Error(ErrorCode::kMismatch, "the base has the tensor, and the state lacks it")
          .with_key(old.begin()->first)
          .with_hint("save a whole version");
    }
    if (writes_) {
      expect_version_before(storage(), report.base);
      header_ = write_delta_header({}, &index);
    }
    report.bytes = bytes + header_.size();
    ByteWriter writer;
    walk_report(writer, report);
    return std::move(writer).take();
  }

  using OldTensors = std::map<std::string_view, const TensorSum*>;

  // Whether the base has the tensor, which is then no longer in `old`. A live delta adds tensors,
  // but neither removes nor reshapes.
  static bool take_kept(OldTensors& old, const DeltaTensor& tensor, bool has_base) {
    const auto found = old.find(tensor.key);
    if (found == old.end()) return false;
    const TensorSum& before = *found->second;
    old.erase(found);
    if (before.dtype != tensor.dtype || before.shape != tensor.shape) {
      throw Error(
          ErrorCode::kMismatch,
          fmt::format("the tensor is {} {}, and {} {} in the base", to_string(tensor.dtype),
                      to_string(tensor.shape), to_string(before.dtype), to_string(before.shape)))
          .with_key(tensor.key)
          .with_hint("save a whole version");
    }
    if (has_base) return true;
    throw Error(ErrorCode::kMismatch,
                "a rank holds another part of the tensor than when the base was made")
        .with_key(tensor.key)
        .with_hint("save a whole version, or give the base as the path of a checkpoint");
  }

  // The state is as it was when it was compared.
  void update_base() {
    threads_->parallel_for(changes_.size(), [&](size_t i) {
      const ShardPart& part = changes_[i];
      const EncodedPiece& change = *part.encoded;
      const ShardSum& sum = shards_[part.shard].sum;
      if (!sum.has_base) return;  // it was copied
      const bool is_whole = change.kind == DeltaKind::kWhole;
      apply_piece(change.kind, change.gap_bytes, change.positions,
                  is_whole ? ByteView(part.now) : ByteView(change.values),
                  memory_of(part.shard, part.box), itemsize(sum.dtype));
    });
    base_.parts.clear();
    for (size_t i = 0; i < shards_.size(); ++i) {
      const ShardSum& sum = shards_[i].sum;
      base_.parts[{sum.key, sum.box}] = {memory_[i], sum.after};
    }
  }

  DeltaBase& base_;
  const bool writes_;
  SavingByRounds saving_;
  std::optional<ThreadPool> threads_;
  std::vector<DeltaShard> shards_;
  bool sums_base_ = false;
  std::vector<ShardPart> changes_;
  std::vector<TensorView> memory_;  // of the shards, in the base that is to be
  std::string file_;
  bool has_file_ = false;
  uint64_t bytes_ = 0;                  // of the file
  std::vector<TensorSum> new_tensors_;  // on the coordinator
  Bytes header_;                        // likewise: with the index
};

}  // namespace

DeltaReport save_delta(const DeltaCall& call, const MadeRequest& request, DeltaBase& base,
                       const std::optional<Location>& from, bool writes) {
  return LiveDelta(call, base, writes).run(request, from);
}

}  // namespace tilestone::engine
