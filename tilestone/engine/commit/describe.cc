#include "tilestone/engine/commit/describe_internal.h"

#include <map>
#include <utility>

#include "tilestone/format/manifest.h"

namespace tilestone::engine {
namespace {

constexpr size_t kNamedObjects = 4;  // in a text for people

}  // namespace

NewIndex describe_save(SaveToIndex save, const Format& format, const Dialect& dialect) {
  std::vector<std::vector<std::string>> written;  // files by rank
  for (const Receipt& receipt : save.receipts) {
    written.emplace_back();
    for (const ReceiptFile& file : receipt.files) {
      written.back().push_back(file.name);
      // It may have items that this checkpoint does not need.
      if (file.steps > 1) save.remains.insert(file.name);
    }
  }
  Metadata metadata = merge_receipts(std::move(save.receipts), save.copies);
  metadata.save_id = save.save_id;
  metadata.writer = save.writer;
  metadata.dialect = dialect.read_as();
  add_replica_names(metadata, save.replicas);
  if (save.dialect_follows) {
    for (IndexFile& file : save.of_dialect) file.role = IndexRole::kAfter;
  }
  NewIndex made;
  made.index = merge_index(format.encode_index(metadata), std::move(save.of_dialect));
  made.files.insert(metadata.files.begin(), metadata.files.end());
  if (save.inventory) made.inventory = inventory_of(metadata, written);
  if (save.inventory && save.common != nullptr) add_common(made.inventory, *save.common);

  Manifest manifest;
  manifest.save_id = save.save_id;
  manifest.world_size = static_cast<int>(save.encoded.size());
  manifest.format = format.name();
  manifest.dialect = dialect.read_as();
  manifest.writer = save.writer;
  manifest.index = sums_of(made.index);
  manifest.attributes = std::move(save.attributes);
  manifest.remains = std::move(save.remains);
  made.manifest = manifest.encode(save.encoded);
  return made;
}

DroppedObjects drop_equal_objects(std::vector<Receipt>& receipts) {
  struct First {
    uint64_t length = 0;
    uint32_t crc32 = 0;
    bool operator==(const First&) const = default;
  };
  std::map<std::string, First> first;
  std::map<std::string, int> differing;  // key -> the first rank whose object differs
  DroppedObjects dropped;
  for (Receipt& receipt : receipts) {
    std::erase_if(receipt.objects, [&](const Receipt::Object& object) {
      const First here{object.at.length, object.at.checksums.item_crc32};
      const auto [known, is_new] = first.emplace(object.key, here);
      if (known->second != here) differing.emplace(object.key, receipt.rank);
      if (!is_new) dropped.remains.insert(receipt.files.at(object.at.file).name);
      return !is_new;
    });
  }
  if (differing.empty()) return dropped;
  dropped.rank = differing.begin()->second;
  dropped.differing = std::to_string(differing.size()) +
                      " objects differ between ranks, and the lowest rank's is saved:";
  size_t named = 0;
  for (const auto& [key, rank] : differing) {
    if (named++ == kNamedObjects) break;
    dropped.differing += (named == 1 ? " " : ", ") + key + " (rank " + std::to_string(rank) + ")";
  }
  return dropped;
}

}  // namespace tilestone::engine
