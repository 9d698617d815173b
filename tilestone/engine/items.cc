#include "tilestone/engine/items_internal.h"

#include <map>
#include <utility>

#include "tilestone/base/checked.h"
#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"

namespace tilestone::engine {
namespace {

// How much larger an object may become when it is decoded.
constexpr uint64_t kExpansion = 1024;
constexpr uint64_t kRoom = 16u << 20;  // bytes

void check_place(const ItemLocation& at, uint64_t file_size) {
  const auto end = try_add(at.offset, at.length);
  if (end && *end <= file_size) return;
  throw Error(ErrorCode::kCorrupt, "an item of " + std::to_string(at.length) + " bytes at offset " +
                                       std::to_string(at.offset) + " reaches beyond the file's " +
                                       std::to_string(file_size) + " bytes");
}

// The decoded item, checked.
Bytes unwrap(const ReadContext& context, const ItemLocation& at, Bytes item, uint64_t max_size) {
  if (context.verify_checksums && at.checksums && crc32(item) != at.checksums->item_crc32) {
    throw Error(ErrorCode::kCorrupt, "the item at offset " + std::to_string(at.offset) +
                                         " is damaged: expected CRC-32 " +
                                         std::to_string(at.checksums->item_crc32) + " of its " +
                                         std::to_string(at.length) + " bytes, found " +
                                         std::to_string(crc32(item)));
  }
  if (at.codec == Codec::kNone) return item;
  return context.format.decode(at.codec, item, max_size);
}

void verify_object(const ReadContext& context, const ItemLocation& at, ByteView item) {
  if (!context.verify_checksums || at.checksums) return;
  if (const auto fault = context.format.verify_item(item)) {
    throw Error(ErrorCode::kCorrupt, "the item at offset " + std::to_string(at.offset) +
                                         " is damaged at its byte " +
                                         std::to_string(fault->offset) + ": " + fault->problem);
  }
}

}  // namespace

Bytes read_item(const ReadContext& context, const ItemLocation& at, const std::string& key,
                uint64_t max_size) {
  const std::string& name = context.metadata.files[at.file];
  try {
    const auto file = context.storage.open(name);
    check_place(at, file->size());
    Bytes item(at.length);
    const ReadOp op{file.get(), at.offset, at.length, item.data()};
    const ReadOptions options{nullptr, context.buffers, context.deadline};
    if (!item.empty()) context.storage.read({&op, 1}, options, [](size_t, ByteView) {});
    return unwrap(context, at, std::move(item), max_size);
  } catch (...) {
    throw current_error().with_key(key).with_file(name);
  }
}

std::vector<Bytes> read_objects(const ReadContext& context,
                                std::span<const StoredObject* const> objects) {
  std::vector<Bytes> items(objects.size());
  std::map<uint32_t, std::unique_ptr<ReadableFile>> files;
  std::vector<ReadOp> ops;
  for (size_t i = 0; i < objects.size(); ++i) {
    const ItemLocation& at = objects[i]->at;
    auto& file = files[at.file];
    try {
      if (!file) file = context.storage.open(context.metadata.files[at.file]);
      check_place(at, file->size());
    } catch (...) {
      throw current_error().with_key(objects[i]->key).with_file(context.metadata.files[at.file]);
    }
    items[i].resize(at.length);
    ops.push_back({file.get(), at.offset, at.length, items[i].data()});
  }
  std::erase_if(ops, [](const ReadOp& op) { return op.size == 0; });
  const ReadOptions options{&context.threads, context.buffers, context.deadline};
  context.storage.read(ops, options, [](size_t, ByteView) {});
  context.threads.parallel_for(objects.size(), [&](size_t i) {
    const ItemLocation& at = objects[i]->at;
    try {
      const uint64_t limit = checked_add(checked_mul(at.length, kExpansion, "bytes of an object"),
                                         kRoom, "bytes of an object");
      items[i] = unwrap(context, at, std::move(items[i]), limit);
      verify_object(context, at, items[i]);
    } catch (...) {
      throw current_error().with_key(objects[i]->key).with_file(context.metadata.files[at.file]);
    }
  });
  return items;
}

}  // namespace tilestone::engine
