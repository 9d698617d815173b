#include "tilestone/engine/open/rank_local_internal.h"

#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/base/size_text.h"
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

// What the ranks have left, by rank; with `only`, nothing of the others. nullopt: some is missing.
std::optional<std::vector<Bytes>> left_by_ranks(StoreCommunicator& meeting, int world,
                                                std::optional<int> only) {
  if (!only) return meeting.take();
  auto left = *only < world ? meeting.message_of(*only) : std::nullopt;
  if (!left) return std::nullopt;
  std::vector<Bytes> all(static_cast<size_t>(world));
  all[static_cast<size_t>(*only)] = *std::move(left);
  return all;
}

// Of an object that several ranks have, leaves copies in all receipts but that of the lowest rank.
void keep_first(std::set<std::string>& keys, Receipt& receipt) {
  std::vector<Receipt::Object> own;
  for (Receipt::Object& object : receipt.objects) {
    (keys.insert(object.key).second ? own : receipt.object_copies).push_back(std::move(object));
  }
  receipt.objects = std::move(own);
}

Bytes encode_manifest(const AttemptHead& head, StoreCommunicator& meeting, const Format& format,
                      const Dialect& dialect, std::optional<int> only) {
  const auto left = left_by_ranks(meeting, head.world_size, only);
  if (!left) return {};
  Manifest manifest;
  manifest.save_id = head.save_id;
  manifest.world_size = head.world_size;
  manifest.format = head.format;
  manifest.dialect = dialect.read_as();
  manifest.writer = head.writer;
  manifest.attributes = head.attributes;
  std::vector<Bytes> encoded;
  std::set<std::string> keys;  // of the objects so far
  for (const Bytes& message : *left) {
    Receipt receipt;
    receipt.rank = static_cast<int>(encoded.size());
    receipt.world_size = head.world_size;
    receipt.save_id = head.save_id;
    if (!message.empty()) {
      const std::string file = meeting.file_of(receipt.rank);
      receipt = Receipt::decode(AttemptReceipt::decode(message, file).receipt);
      // Another version may encode the metadata in another way.
      const bool known = head.writer == writer_name();
      if (known) manifest.index.push_back(sums_of({describe_rank(receipt, format)}).front());
    }
    keep_first(keys, receipt);
    encoded.push_back(receipt.encode());
  }
  return manifest.encode(encoded);
}

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
  StoreCommunicator meeting = meeting_of(storage, *head);
  try {
    return encode_manifest(*head, meeting, format, dialect, rank);
  } catch (Error& error) {
    if (error.code() == ErrorCode::kCorrupt && error.hint().empty()) {
      error.with_hint(how_to_read_without_attempt(save_id));
    }
    throw;
  }
}

}  // namespace tilestone::engine
