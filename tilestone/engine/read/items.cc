#include "tilestone/engine/read/items_internal.h"

#include <map>
#include <utility>

#include "tilestone/base/checked.h"
#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/read/range_reader_internal.h"

namespace tilestone::engine {
namespace {

constexpr uint64_t kObjectExpansion = 1024;
constexpr uint64_t kLargerStorage = 64;
constexpr uint64_t kRoom = 16u << 20;  // bytes

constexpr uint64_t kUnasked = 64u << 20;  // bytes
constexpr uint64_t kViewExpansion = 1024;
constexpr uint64_t kCodecExpansion = 65536;

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
  if (const auto fault = context.format.verify_object(item)) {
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
    RangeReader reader(context, nullptr);
    check_place(at, reader.open(at.file).size());
    Bytes item(at.length);
    reader.add({.file = at.file, .begin = at.offset, .size = at.length, .target = item.data()});
    reader.read();
    return unwrap(context, at, std::move(item), max_size);
  } catch (...) {
    throw current_error().with_key(key).with_file(name);
  }
}

std::vector<Bytes> read_objects(const ReadContext& context,
                                std::span<const StoredObject* const> objects) {
  std::vector<Bytes> items(objects.size());
  RangeReader reader(context, &context.threads);
  for (size_t i = 0; i < objects.size(); ++i) {
    const ItemLocation& at = objects[i]->at;
    try {
      check_place(at, reader.open(at.file).size());
    } catch (...) {
      throw current_error().with_key(objects[i]->key).with_file(context.metadata.files[at.file]);
    }
    items[i].resize(at.length);
    reader.add({.file = at.file,
                .begin = at.offset,
                .size = at.length,
                .target = items[i].data(),
                .key = &objects[i]->key});
    if (reader.full()) reader.read();
  }
  reader.read();
  context.threads.parallel_for(objects.size(), [&](size_t i) {
    const ItemLocation& at = objects[i]->at;
    try {
      items[i] = unwrap(context, at, std::move(items[i]), decoded_limit(at));
      verify_object(context, at, items[i]);
    } catch (...) {
      throw current_error().with_key(objects[i]->key).with_file(context.metadata.files[at.file]);
    }
  });
  return items;
}

uint64_t decoded_limit(const ItemLocation& object) {
  return checked_add(checked_mul(object.length, kObjectExpansion, "bytes of an object"), kRoom,
                     "bytes of an object");
}

uint64_t decoded_limit(const StoredTensor& tensor, const StoredChunk& chunk) {
  const uint64_t elements = checked_mul(static_cast<uint64_t>(numel(item_shape(chunk))),
                                        itemsize(tensor.dtype), "bytes of a chunk");
  return checked_add(checked_mul(elements, kLargerStorage, "bytes of a chunk"), kRoom,
                     "bytes of a chunk");
}

void expect_stored(const ReadContext& context, uint64_t bytes, const StoredTensor& tensor,
                   std::span<const uint32_t> chunks) {
  if (bytes <= kUnasked) return;
  std::map<uint32_t, uint64_t> sizes;
  uint64_t plausible = 0;
  for (const uint32_t index : chunks) {
    const ItemLocation& at = tensor.chunks[index].at;
    const std::string& name = context.metadata.files[at.file];
    try {
      auto [size, is_new] = sizes.try_emplace(at.file, 0);
      if (is_new) size->second = open_data(context, at.file)->size();
      check_place(at, size->second);
    } catch (...) {
      throw current_error().with_key(tensor.key).with_file(name);
    }
    const uint64_t factor = at.codec == Codec::kNone ? kViewExpansion : kCodecExpansion;
    const auto more = try_mul(at.length, factor);
    plausible = try_add(plausible, more.value_or(UINT64_MAX)).value_or(UINT64_MAX);
  }
  if (bytes <= plausible) return;
  throw Error(ErrorCode::kCorrupt, "the metadata promises " + std::to_string(bytes) +
                                       " bytes of elements, the items that should hold them are "
                                       "too small for that")
      .with_key(tensor.key);
}

}  // namespace tilestone::engine
