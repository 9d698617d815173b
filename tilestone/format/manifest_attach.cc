// Joins the manifest's items to the items in the metadata. Items that the index does not name are
// copies.
#include <algorithm>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/format/manifest.h"

namespace tilestone {
namespace {

// One item in the manifest.
struct Entry {
  const ReceiptItem* item = nullptr;
  const std::string* key = nullptr;
  const Box* box = nullptr;  // null: an object
  bool is_copy = false;      // reported as a copy
  bool found = false;        // the index names it
  uint64_t content = 0;      // the content hash of an object; 0: not recorded
};

// The manifest's items by file (an index into Metadata::files) and offset in the file. Adds files
// that the index does not name to Metadata::files.
class ItemIndex {
 public:
  ItemIndex(Metadata& metadata, const Manifest& manifest) : metadata_(metadata) {
    size_t most = metadata.files.size();
    for (const Receipt& receipt : manifest.receipts) most += receipt.files.size();
    metadata.files.reserve(most);  // files_ borrows the names
    for (uint32_t i = 0; i < metadata.files.size(); ++i) files_.emplace(metadata.files[i], i);
    by_file_.resize(metadata.files.size());
    for (const Receipt& receipt : manifest.receipts) add(receipt);
    const auto before = [](const Entry& a, const Entry& b) {
      return a.item->offset < b.item->offset;
    };
    for (auto& entries : by_file_) {
      if (!std::is_sorted(entries.begin(), entries.end(), before)) {
        std::sort(entries.begin(), entries.end(), before);
      }
    }
  }

  Entry* find(const ItemLocation& at) {
    std::vector<Entry>& entries = by_file_[at.file];
    // Neighbours in the metadata are usually neighbours in the file.
    auto found = entries.begin() + static_cast<ptrdiff_t>(std::min(next_, entries.size()));
    if (found == entries.end() || found->item->offset != at.offset) {
      found = std::lower_bound(
          entries.begin(), entries.end(), at.offset,
          [](const Entry& entry, uint64_t offset) { return entry.item->offset < offset; });
    }
    next_ = static_cast<size_t>(found - entries.begin()) + 1;
    return found != entries.end() && found->item->offset == at.offset ? &*found : nullptr;
  }

  size_t items() const { return items_; }
  const std::vector<std::vector<Entry>>& by_file() const { return by_file_; }

 private:
  void add(const Receipt& receipt) {
    items_ += receipt.copies.size() + receipt.objects.size() + receipt.object_copies.size();
    std::vector<uint32_t> files;  // index into Metadata::files, by index into receipt.files
    for (const ReceiptFile& file : receipt.files) files.push_back(index_of(file.name));
    for (const Receipt::Chunk& chunk : receipt.chunks) {
      // An item without bytes (safetensors) begins where the next one does, and no index names it.
      if (chunk.at.length == 0) continue;
      ++items_;
      by_file_[files[chunk.at.file]].push_back(
          {&chunk.at, &receipt.tensors[chunk.tensor].key, &chunk.box});
    }
    for (const Receipt::Chunk& copy : receipt.copies) {
      by_file_[files[copy.at.file]].push_back(
          {&copy.at, &receipt.tensors[copy.tensor].key, &copy.box, true});
    }
    for (const Receipt::Object& object : receipt.objects) {
      by_file_[files[object.at.file]].push_back(
          {&object.at, &object.key, nullptr, false, false, object.content});
    }
    for (const Receipt::Object& copy : receipt.object_copies) {
      by_file_[files[copy.at.file]].push_back(
          {&copy.at, &copy.key, nullptr, true, false, copy.content});
    }
  }

  uint32_t index_of(const std::string& name) {
    const auto next = static_cast<uint32_t>(metadata_.files.size());
    const auto [found, is_new] = files_.try_emplace(name, next);
    if (is_new) {
      metadata_.files.push_back(name);
      by_file_.emplace_back();
    }
    return found->second;
  }

  Metadata& metadata_;
  std::unordered_map<std::string_view, uint32_t> files_;
  std::vector<std::vector<Entry>> by_file_;
  size_t items_ = 0;
  size_t next_ = 0;  // index after the last entry found
};

void attach(const Metadata& metadata, ItemIndex& index, const std::string& key, const Box* box,
            ItemLocation& at) {
  Entry* entry = index.find(at);
  const bool same = entry != nullptr && !entry->is_copy && !entry->found && *entry->key == key &&
                    entry->item->length == at.length &&
                    (entry->box != nullptr) == (box != nullptr) &&
                    (box == nullptr || *entry->box == *box);
  if (!same) {
    throw Error(ErrorCode::kCorrupt, "manifest: it contradicts the index about the item of " +
                                         std::to_string(at.length) + " bytes at offset " +
                                         std::to_string(at.offset))
        .with_key(key)
        .with_file(metadata.files[at.file]);
  }
  entry->found = true;
  at.checksums = entry->item->checksums;
}

// Adds the items that the index does not name to the metadata, as copies of chunks and objects that
// it names.
class CopyFinder {
 public:
  explicit CopyFinder(Metadata& metadata) : metadata_(metadata) {}

  void attach(const std::vector<std::vector<Entry>>& by_file) {
    for (const std::vector<Entry>& entries : by_file) {
      for (const Entry& entry : entries) {
        if (entry.found && entry.content != 0) contents_.emplace(*entry.key, entry.content);
      }
    }
    for (uint32_t file = 0; file < by_file.size(); ++file) {
      for (const Entry& entry : by_file[file]) {
        if (!entry.found) attach_entry(entry, file);
      }
    }
    std::sort(metadata_.copies.begin(), metadata_.copies.end(),
              [](const StoredCopy& a, const StoredCopy& b) {
                return std::tie(a.tensor, a.chunk, a.at.file) <
                       std::tie(b.tensor, b.chunk, b.at.file);
              });
  }

 private:
  void attach_entry(const Entry& entry, uint32_t file) {
    if (entry.box == nullptr) return attach_object(entry, file);
    const StoredTensor* tensor = metadata_.find_tensor(*entry.key);
    const auto chunk = tensor != nullptr ? chunks_of(*tensor).find(*entry.box) : std::nullopt;
    if (!chunk || tensor->chunks[*chunk].at.file == file) fail(entry, file);
    const auto t = static_cast<uint32_t>(tensor - metadata_.tensors.data());
    metadata_.copies.push_back({t, *chunk, location(entry, file)});
    copy_blocks(*tensor->chunks[*chunk].at.checksums, *metadata_.copies.back().at.checksums);
  }

  // A copy has the same payload, so it has the same blocks.
  static void copy_blocks(const ItemChecksums& chunk, ItemChecksums& copy) {
    if (chunk.payload_crc32 == copy.payload_crc32 && chunk.blocks) copy.blocks = chunk.blocks;
  }

  void attach_object(const Entry& entry, uint32_t file) {
    const StoredObject* const found = metadata_.find_object(*entry.key);
    if (!entry.is_copy || found == nullptr || found->at.file == file) fail(entry, file);
    StoredObject& object = metadata_.objects[static_cast<size_t>(found - metadata_.objects.data())];
    const auto content = contents_.find(*entry.key);
    const bool same = content != contents_.end() && content->second == entry.content;
    (same ? object.copies : object.unlike).push_back(location(entry, file));
  }

  [[noreturn]] void fail(const Entry& entry, uint32_t file) const {
    throw Error(ErrorCode::kCorrupt,
                "manifest: the item at offset " + std::to_string(entry.item->offset) +
                    " is neither named by the index nor a copy of an item in another file")
        .with_key(*entry.key)
        .with_file(metadata_.files[file]);
  }

  static ItemLocation location(const Entry& entry, uint32_t file) {
    const ReceiptItem& item = *entry.item;
    return {file, Codec::kNone, item.offset, item.length, item.checksums};
  }

  const ChunksByBox& chunks_of(const StoredTensor& tensor) {
    return chunks_.try_emplace(&tensor, tensor).first->second;
  }

  Metadata& metadata_;
  std::unordered_map<const StoredTensor*, ChunksByBox> chunks_;
  std::unordered_map<std::string_view, uint64_t> contents_;  // of objects, by key
};

size_t items_of(const Metadata& metadata) {
  size_t items = metadata.objects.size();
  for (const StoredTensor& tensor : metadata.tensors) items += tensor.chunks.size();
  return items;
}

bool has_paths(const Metadata& metadata) {
  const auto has = [](const auto& item) { return !item.path.empty(); };
  return std::any_of(metadata.tensors.begin(), metadata.tensors.end(), has) ||
         std::any_of(metadata.objects.begin(), metadata.objects.end(), has);
}

// Takes the paths from the manifest, for an index that has only keys (zarr's).
void add_paths(Metadata& metadata, const Manifest& manifest) {
  std::unordered_map<std::string_view, const Path*> paths;
  for (const Receipt& receipt : manifest.receipts) {
    for (const auto& tensor : receipt.tensors) {
      if (!tensor.path.empty()) paths.emplace(tensor.key, &tensor.path);
    }
    for (const auto& object : receipt.objects) {
      if (!object.path.empty()) paths.emplace(object.key, &object.path);
    }
  }
  const auto give = [&](auto& items) {
    for (auto& item : items) {
      if (const auto found = paths.find(item.key); found != paths.end()) item.path = *found->second;
    }
  };
  give(metadata.tensors);
  give(metadata.objects);
}

// Adds the order of the leaves, unless the manifest does not record it. Of the ranks that have a
// leaf, the lowest counts.
void add_order(Metadata& metadata, const Manifest& manifest) {
  std::unordered_map<std::string_view, uint32_t> places;
  bool is_known = false;
  const auto note = [&](const std::string& key, uint32_t order) {
    places.emplace(key, order);
    is_known = is_known || order != 0;
  };
  for (const Receipt& receipt : manifest.receipts) {
    for (const auto& tensor : receipt.tensors) note(tensor.key, tensor.order);
    for (const auto& object : receipt.objects) note(object.key, object.order);
    for (const auto& [path, keys] : receipt.dict_keys) is_known = is_known || keys.order != 0;
  }
  if (!is_known) return;
  const auto give = [&](auto& items) {
    for (auto& item : items) {
      const auto found = places.find(item.key);
      item.order = found == places.end() ? 0 : found->second;
    }
  };
  give(metadata.tensors);
  give(metadata.objects);
}

void add_attributes_and_keys(Metadata& metadata, const Manifest& manifest) {
  for (const Receipt& receipt : manifest.receipts) {
    add_keys(metadata.dict_keys, receipt.dict_keys);
    for (const auto& [tensor, attributes] : receipt.attributes) {
      metadata.attributes[receipt.tensors[tensor].key].insert(attributes.begin(), attributes.end());
    }
  }
}

}  // namespace

void attach_manifest(Metadata& metadata, const Manifest& manifest) {
  const size_t named = items_of(metadata);
  ItemIndex index(metadata, manifest);
  for (StoredTensor& tensor : metadata.tensors) {
    for (StoredChunk& chunk : tensor.chunks) {
      attach(metadata, index, tensor.key, &chunk.box, chunk.at);
    }
  }
  for (StoredObject& object : metadata.objects) {
    attach(metadata, index, object.key, nullptr, object.at);
  }
  if (index.items() != named) CopyFinder(metadata).attach(index.by_file());
  if (!has_paths(metadata)) add_paths(metadata, manifest);
  add_order(metadata, manifest);
  add_attributes_and_keys(metadata, manifest);
  metadata.writer = manifest.writer;
}

}  // namespace tilestone
