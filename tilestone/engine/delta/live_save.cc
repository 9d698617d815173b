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

#include "tilestone/base/error.h"
#include "tilestone/engine/convert/stored_source_internal.h"
#include "tilestone/engine/delta/box_crc_internal.h"
#include "tilestone/engine/delta/compare_internal.h"
#include "tilestone/engine/delta/live_internal.h"
#include "tilestone/engine/delta/versions_internal.h"
#include "tilestone/engine/run/resources_internal.h"
#include "tilestone/engine/save/by_rounds_internal.h"

namespace tilestone::engine {
namespace {

// A box that this rank writes.
struct Shard {
  ShardSum sum;
  TensorView now;
  DeltaBase::Part* base = nullptr;  // null: the base has no such tensor
  std::vector<std::pair<Box, EncodedPiece>> changes = {};
};

DeltaTensor tensor_of(const ShardSum& sum) {
  return {.key = sum.key, .dtype = sum.dtype, .shape = sum.shape};
}

// The boxes that the ranks have agreed this one writes.
std::vector<Shard> shards_of(const SaveShare& share) {
  std::vector<Shard> all, written;
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
      if (Rounds::reached_all(current_error())) remove_file();
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
    for (Shard& shard : shards_) {
      const auto found = base_.parts.find({shard.sum.key, shard.sum.box});
      const bool fits = found != base_.parts.end() && found->second.memory.dtype == shard.sum.dtype;
      if (fits) shard.base = &found->second;
      shard.sum.has_base = fits;
    }
  }

  void read_base(const Location& from) {
    OpenOptions options;
    options.resources = share().options.resources;
    const auto source = StoredSource::open(from, options);
    base_ = {};
    std::vector<TensorItem> items;
    for (const Shard& shard : shards_) {
      const ShardSum& sum = shard.sum;
      const StoredTensor* const stored = source->metadata().find_tensor(sum.key);
      if (stored == nullptr || stored->dtype != sum.dtype || stored->shape != sum.shape) continue;
      TensorView memory = TensorView::allocate(sum.dtype, sum.box.shape);
      TensorItem item;
      item.key = sum.key;
      item.dtype = sum.dtype;
      item.global_shape = sum.shape;
      item.pieces.push_back({sum.box, memory});
      items.push_back(std::move(item));
      base_.parts[{sum.key, sum.box}] = {std::move(memory), 0};
    }
    source->read(items, false);
    for (const TensorItem& item : items) {
      const Piece& piece = item.pieces.front();
      base_.parts.at({item.key, piece.box}).portion =
          portion_of(piece.data, piece.box, item.global_shape, *threads_);
    }
    for (const StoredTensor& tensor : source->metadata().tensors) {
      base_.tensors.push_back({tensor.key, tensor.dtype, tensor.shape});
    }
  }

  void expect_free() {
    for (const std::string& name : {std::string(kDeltaName), std::string(".metadata")}) {
      if (!storage().stat(name)) continue;
      throw Error(ErrorCode::kAlreadyExists, "a version is at " + storage().describe())
          .with_file(name)
          .with_hint("save it elsewhere");
    }
  }

  // Encodes and writes what has changed; returns the sums. Nothing is written without changes.
  Bytes make() {
    DeltaBody body(nullptr);
    file_ = fmt::format("delta-{:05}-of-{:05}-{}.safetensors", share().rank + 1, share().world_size,
                        share().save_id.substr(0, 8));
    for (Shard& shard : shards_) {
      try {
        compare(shard, body);
      } catch (Error& error) {
        error.with_key(shard.sum.key);
        throw;
      }
    }
    const std::vector<DeltaEntry> entries = body.entries();
    if (writes_ && !entries.empty()) {
      const Bytes header = write_delta_header(entries, nullptr);
      const Deadline deadline = saving_.rounds.deadline();
      has_file_ = true;
      body.write(storage(), file_, header, deadline);
      storage().settle("");
      bytes_ = header.size() + body.bytes();
    }
    ByteWriter writer;
    writer.u64(bytes_);
    std::vector<ShardSum> sums;
    for (const Shard& shard : shards_) sums.push_back(shard.sum);
    writer.raw(encode_sums(sums));
    return std::move(writer).take();
  }

  void compare(Shard& shard, DeltaBody& body) {
    ShardSum& sum = shard.sum;
    if (shard.base != nullptr) sum.before = shard.base->portion;
    if (!writes_) {
      sum.after = portion_of(shard.now, sum.box, sum.shape, *threads_);
      return;
    }
    const DeltaTensor tensor = tensor_of(sum);
    const std::vector<Box> boxes = pieces_of(sum.box, itemsize(sum.dtype));
    for (const auto& [some, begin, size] : some_at_once(boxes, itemsize(sum.dtype))) {
      const ByteView now = elements_of(shard.now, begin, size, scratch_);
      const ByteView old =
          shard.base != nullptr ? ByteView(shard.base->memory.data + begin, size) : ByteView();
      for (ComparedPiece& piece : compare_pieces(tensor, some, old, now, false, *threads_)) {
        sum.after ^= piece.after;
        if (!piece.encoded) continue;
        sum.pieces.push_back(body.add(tensor, piece.box, *piece.encoded, piece.now));
        sum.pieces.back().file = file_;
        shard.changes.emplace_back(piece.box, *std::move(piece.encoded));
      }
    }
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
    try {
      std::vector<std::string> files = storage().list_files("delta-");
      std::erase_if(files, [&](const std::string& file) {
        return file.find("-" + share().save_id.substr(0, 8) + ".") != std::string::npos;
      });
      storage().remove(files);
    } catch (const Error& error) {
      log(LogLevel::kWarning, std::string("save_delta: a file is left: ") + error.what());
    }
  }

  DeltaReport finish(const Bytes& answer) {
    DeltaReport report;
    ByteReader reader(answer, "the outcome of a delta");
    report.base = reader.string();
    report.result = reader.string();
    for (uint64_t* number :
         {&report.unchanged, &report.changed, &report.added, &report.bytes, &report.whole_bytes}) {
      *number = reader.u64();
    }
    update_base();
    base_.id = report.result;
    base_.tensors = std::move(new_tensors_);
    return report;
  }

  // On the coordinator: makes the index of all ranks' sums, and the answer to them.
  Bytes merged(const std::vector<Bytes>& payloads) {
    std::map<std::string, DeltaTensor, std::less<>> tensors;
    std::map<std::string, std::pair<uint32_t, bool>, std::less<>> before;  // and: has a base
    SummedTensors sums;
    uint64_t bytes = 0;
    for (size_t rank = 0; rank < payloads.size(); ++rank) {
      const ByteView payload(payloads[rank]);
      bytes += ByteReader(payload, "the sums of a rank").u64();
      const auto of_rank = decode_sums(payload.subspan(sizeof bytes), static_cast<int>(rank));
      add_sums(sums, of_rank, static_cast<int>(rank));
      for (const ShardSum& sum : of_rank) {
        DeltaTensor& tensor = tensors.try_emplace(sum.key, tensor_of(sum)).first->second;
        tensor.pieces.insert(tensor.pieces.end(), sum.pieces.begin(), sum.pieces.end());
        auto& [portion, has_base] = before.try_emplace(sum.key, 0, true).first->second;
        portion ^= sum.before;
        has_base = has_base && (sum.has_base || sum.box.empty());
      }
    }
    expect_covered(sums);
    OldTensors old;
    for (const TensorSum& tensor : base_.tensors) old.emplace(tensor.key, &tensor);
    std::vector<DeltaTensor> made;
    for (auto& [key, tensor] : tensors) {
      tensor.after = sums.at(key).crc32();
      if (take_kept(old, tensor, before.at(key).second)) {
        tensor.before = crc_of_portions(before.at(key).first, tensor.bytes());
      }
      made.push_back(std::move(tensor));
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
    writer.string(report.base);
    writer.string(report.result);
    for (const uint64_t number :
         {report.unchanged, report.changed, report.added, report.bytes, report.whole_bytes}) {
      writer.u64(number);
    }
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

  void remove_file() noexcept {
    if (!has_file_) return;
    try {
      storage().remove(file_);
    } catch (const Error& error) {
      log(LogLevel::kWarning, std::string("save_delta: a file is left: ") + error.what());
    }
  }

  // The state is as it was when it was compared.
  void update_base() {
    std::map<std::pair<std::string, Box>, DeltaBase::Part> parts;
    for (Shard& shard : shards_) {
      DeltaBase::Part part;
      if (shard.base != nullptr) part = std::move(*shard.base);
      if (shard.base == nullptr || !writes_) {
        part.memory = TensorView::allocate(shard.sum.dtype, shard.sum.box.shape);
        copy_all(shard, part.memory);
      } else {
        apply_changes(shard, part.memory);
      }
      part.portion = shard.sum.after;
      parts.emplace(std::pair(shard.sum.key, shard.sum.box), std::move(part));
    }
    base_.parts = std::move(parts);
  }

  void copy_all(const Shard& shard, const TensorView& memory) {
    const uint64_t bytes = memory.bytes();
    const auto count = static_cast<size_t>((bytes + kPieceBytes - 1) / kPieceBytes);
    threads_->parallel_for(count, [&](size_t i) {
      const uint64_t begin = i * kPieceBytes;
      const uint64_t size = std::min(kPieceBytes, bytes - begin);
      Bytes scratch;
      const ByteView now = elements_of(shard.now, begin, size, scratch);
      std::copy(now.begin(), now.end(), memory.data + begin);
    });
  }

  void apply_changes(const Shard& shard, const TensorView& memory) {
    const uint64_t item = itemsize(shard.sum.dtype);
    const Dims strides = contiguous_strides(shard.sum.box.shape);
    threads_->parallel_for(shard.changes.size(), [&](size_t i) {
      const auto& [box, change] = shard.changes[i];
      uint64_t begin = 0;
      for (size_t d = 0; d < box.rank(); ++d) {
        begin += static_cast<uint64_t>((box.offset[d] - shard.sum.box.offset[d]) * strides[d]);
      }
      begin *= item;
      const MutableByteView elements(memory.data + begin,
                                     static_cast<uint64_t>(box.numel()) * item);
      Bytes scratch;
      const ByteView values = change.kind == DeltaKind::kWhole
                                  ? elements_of(shard.now, begin, elements.size(), scratch)
                                  : ByteView(change.values);
      apply_piece(change.kind, change.gap_bytes, change.positions, values, elements, item);
    });
  }

  DeltaBase& base_;
  const bool writes_;
  SavingByRounds saving_;
  std::optional<ThreadPool> threads_;
  std::vector<Shard> shards_;
  std::string file_;
  bool has_file_ = false;
  uint64_t bytes_ = 0;  // of the file
  Bytes scratch_;
  std::vector<TensorSum> new_tensors_;  // on the coordinator
  Bytes header_;                        // likewise: with the index
};

}  // namespace

DeltaReport keep_base(const DeltaCall& call, const MadeRequest& request, DeltaBase& base) {
  base = {};
  return LiveDelta(call, base, false).run(request, std::nullopt);
}

DeltaReport save_delta(const DeltaCall& call, const MadeRequest& request, DeltaBase& base,
                       const std::optional<Location>& from) {
  return LiveDelta(call, base, true).run(request, from);
}

}  // namespace tilestone::engine
