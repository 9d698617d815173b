#include "tilestone/engine/open/rank_local_internal.h"

#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/open/attempt_files_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/run/terms_internal.h"
#include "tilestone/format/data_file_name.h"
#include "tilestone/format/manifest.h"
#include "tilestone/version.h"

namespace tilestone::engine {
namespace {

// The heads of rank-local saves without a communicator that have begun here and were not abandoned.
std::vector<AttemptHead> rank_local_heads(Storage& storage, std::span<const std::string> names) {
  std::vector<AttemptHead> heads;
  for (const std::string& name : names) {
    const auto own = parse_in_tilestone_directory(name);
    if (!own || name != attempt_name(own->save_id)) continue;
    auto head = read_head(storage, own->save_id);
    if (!head || !head->rank_local) continue;
    // An abandoned save that gc has not removed yet is not the one of the existing checkpoint.
    if (read_outcome(storage, own->save_id) == Outcome::kAbandoned) continue;
    heads.push_back(*std::move(head));
  }
  return heads;
}

// Collects the receipts of an attempt for manifest_of_receipts().
class ReceiptCollector {
 public:
  ReceiptCollector(Storage& storage, const AttemptHead& head, const Format& format,
                   const Dialect& dialect)
      : head_(head), format_(format), meeting_(meeting_of(storage, head)) {
    manifest_.save_id = head.save_id;
    manifest_.world_size = head.world_size;
    manifest_.format = head.format;
    manifest_.dialect = dialect.read_as();
    manifest_.writer = head.writer;
    manifest_.attributes = head.attributes;
  }

  // Both return false if a receipt is missing.
  bool add_all() {
    const auto all = meeting_.take();
    for (size_t rank = 0; all && rank < all->size(); ++rank) add((*all)[rank]);
    return all.has_value();
  }
  bool add_only(int rank) {
    if (rank >= head_.world_size) return false;
    const std::optional<Bytes> left = meeting_.message_of(rank);
    if (!left) return false;
    while (next() < rank) add_empty();
    add(*left);
    while (next() < head_.world_size) add_empty();
    return true;
  }

  Bytes encode() const { return manifest_.encode(encoded_); }

 private:
  int next() const { return static_cast<int>(encoded_.size()); }

  void add_empty() {
    Receipt empty;
    empty.rank = next();
    empty.world_size = head_.world_size;
    empty.save_id = head_.save_id;
    encoded_.push_back(empty.encode());
  }

  void add(ByteView left) {
    AttemptReceipt of_rank = AttemptReceipt::decode(left, meeting_.file_of(next()));
    Receipt receipt = Receipt::decode(of_rank.receipt);
    const size_t copies = receipt.object_copies.size();
    std::vector<Receipt::Object> own;
    for (const Receipt::Object& object : receipt.objects) {
      (keys_.insert(object.key).second ? own : receipt.object_copies).push_back(object);
    }
    // Another version may encode the metadata in another way.
    if (head_.writer == writer_name()) {
      manifest_.index.push_back(sums_of({describe_rank(receipt, format_)}).front());
    }
    const bool is_changed = receipt.object_copies.size() != copies;
    receipt.objects = std::move(own);
    encoded_.push_back(is_changed ? receipt.encode() : std::move(of_rank.receipt));
  }

  const AttemptHead& head_;
  const Format& format_;
  StoreCommunicator meeting_;
  Manifest manifest_;
  std::vector<Bytes> encoded_;  // the receipts, by rank
  std::set<std::string> keys_;  // of the objects so far
};

}  // namespace

bool is_rank_local(const Format& format, std::span<const std::string> names) {
  const std::vector<std::string> rank_local = format.rank_local_files(names);
  return !rank_local.empty() && format.index_files(names).size() == rank_local.size();
}

void expect_all_ranks(Storage& storage, const Format& format, std::span<const std::string> names) {
  for (const AttemptHead& head : rank_local_heads(storage, names)) {
    std::vector<int> missing;
    for (int rank = 0; rank < head.world_size; ++rank) {
      if (!contains_name(names, format.rank_index_name(rank))) missing.push_back(rank);
    }
    if (missing.empty()) continue;
    const bool one = missing.size() == 1;
    throw Error(ErrorCode::kNotFound,
                "no complete checkpoint at " + storage.describe() + ": in the rank-local save " +
                    head.save_id + ", " + ranks_text(missing) + " of " +
                    std::to_string(head.world_size) + (one ? " has" : " have") + " no metadata")
        .with_file(format.rank_index_name(missing.front()))
        .with_rank(missing.front())
        .with_hint(std::string("`tilestone publish` completes the save if ") +
                   (one ? "this rank has" : "these ranks have") + " written; else " +
                   (one ? "it" : "they") +
                   " can save again under the same token, or `tilestone gc "
                   "--abandon` ends the save");
  }
}

void expect_own_files(Storage& storage, const Format& format, std::span<const std::string> names,
                      const Metadata& metadata) {
  const std::string& id = metadata.save_id;
  if (is_save_id(id) && read_outcome(storage, id) == Outcome::kAbandoned) {
    throw Error(ErrorCode::kNotFound, "no checkpoint at " + storage.describe() +
                                          ": the rank-local save " + id + " was abandoned")
        .with_file(format.rank_local_files(names).front())
        .with_hint("remove the metadata files of its ranks");
  }
  for (const std::string& name : metadata.files) {
    const auto own = parse_tilestone_name(name);
    if (!own || own->save_id == id) continue;
    throw Error(ErrorCode::kCorrupt, "the metadata of a rank names the save \"" + id +
                                         "\" and a file of the save " + own->save_id)
        .with_file(name);
  }
}

void expect_no_other_ranks(const Format& format, std::span<const std::string> names,
                           const Metadata& metadata) {
  const std::string& id = metadata.save_id;
  for (const std::string& name : names) {
    const auto data = parse_data_file_name(name);
    if (!data || contains_name(names, format.rank_index_name(data->rank))) continue;
    // Data files of other Tilestone saves may be leftovers.
    if (is_save_id(data->save_id) && data->save_id != id) continue;
    throw Error(ErrorCode::kCorrupt, "a rank-local checkpoint has a data file of rank " +
                                         std::to_string(data->rank) +
                                         " and no metadata of that rank")
        .with_file(name)
        .with_rank(data->rank)
        .with_hint(
            "the save of that rank failed or is under way; if the file is left from an older "
            "checkpoint, remove it");
  }
}

IndexFile describe_rank(Receipt receipt, const Format& format) {
  Metadata metadata;
  metadata.save_id = receipt.save_id;
  metadata.writer = writer_name();
  for (ReceiptFile& file : receipt.files) metadata.files.push_back(std::move(file.name));
  const auto place_of = [](const ReceiptItem& item) {
    return ItemLocation{item.file, Codec::kNone, item.offset, item.length, item.checksums};
  };
  for (Receipt::Tensor& tensor : receipt.tensors) {
    metadata.tensors.push_back({std::move(tensor.key),
                                std::move(tensor.path),
                                tensor.dtype,
                                std::move(tensor.global_shape),
                                {}});
  }
  for (Receipt::Chunk& chunk : receipt.chunks) {
    metadata.tensors.at(chunk.tensor).chunks.push_back({std::move(chunk.box), place_of(chunk.at)});
  }
  for (Receipt::Object& object : receipt.objects) {
    metadata.objects.push_back(
        {std::move(object.key), std::move(object.path), place_of(object.at)});
  }
  metadata.index();
  return {format.rank_index_name(receipt.rank), format.encode_rank_index(metadata),
          IndexRole::kSwitch};
}

Bytes manifest_of_receipts(Storage& storage, const Format& format, const Dialect& dialect,
                           const std::string& save_id, std::optional<int> rank) {
  if (!is_save_id(save_id)) return {};
  const auto head = read_head(storage, save_id);
  if (!head || !head->rank_local) return {};
  ReceiptCollector receipts(storage, *head, format, dialect);
  try {
    if (rank ? receipts.add_only(*rank) : receipts.add_all()) {
      return receipts.encode();
    }
  } catch (Error& error) {
    if (error.code() == ErrorCode::kCorrupt && error.hint().empty()) {
      error.with_hint(how_to_read_without_attempt(save_id));
    }
    throw;
  }
  return {};
}

}  // namespace tilestone::engine
