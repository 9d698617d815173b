#include "tilestone/engine/read/items_internal.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "tilestone/base/checked.h"
#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/engine/read/lost_files_internal.h"
#include "tilestone/engine/read/payloads_internal.h"
#include "tilestone/engine/read/range_reader_internal.h"
#include "tilestone/format/archive/torch_archive.h"

namespace tilestone::engine {
namespace {

constexpr uint64_t kObjectExpansion = 1024;
constexpr uint64_t kLargerStorage = 64;
constexpr uint64_t kRoom = 16u << 20;  // bytes

constexpr uint64_t kUnchecked = 64u << 20;  // bytes
constexpr uint64_t kViewExpansion = 1024;
constexpr uint64_t kCodecExpansion = 65536;

void check_place(const ItemLocation& at, uint64_t file_size) {
  const auto end = try_add(at.offset, at.length);
  if (end && *end <= file_size) return;
  throw Error(ErrorCode::kCorrupt, "an item of " + std::to_string(at.length) + " bytes at offset " +
                                       std::to_string(at.offset) + " reaches beyond the file's " +
                                       std::to_string(file_size) + " bytes");
}

// Checks the item's checksum and decodes it.
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

namespace {

class ObjectReader {
 public:
  ObjectReader(const ReadContext& context, std::span<const ObjectRead> objects)
      : context_(context), lost_(context), items_(objects.size()) {
    for (size_t i = 0; i < objects.size(); ++i) {
      expect_supported(*objects[i].stored);
      if (const auto& value = objects[i].stored->value) {
        items_[i] = write_torch_archive(*value);
        continue;
      }
      pending_.push_back({i, objects[i], {}, {}});
    }
  }

  std::vector<Bytes> run() {
    for (Reading& reading : pending_) {
      reading.from.place = lost_.place_of_object(*reading.from.stored, reading.from.place);
    }
    while (!pending_.empty()) {
      read();
      context_.threads.parallel_for(pending_.size(), [&](size_t i) { check(pending_[i]); });
      std::erase_if(pending_, [](const Reading& reading) { return !reading.damage; });
      for (Reading& reading : pending_) choose_next_place(reading);
    }
    return std::move(items_);
  }

 private:
  struct Reading {
    size_t index = 0;  // of the objects
    ObjectRead from;
    std::optional<Error> damage;  // found where it was read last
    std::set<size_t> tried;       // places
    const ItemLocation& at() const { return place_of(*from.stored, from.place); }
  };

  void read() {
    RangeReader reader(context_, &context_.threads);
    std::vector<Reading*> batch;
    const auto read_batch = [&] {
      RangeReader::Unread unread;
      const auto has_copies = [](const Reading* r) { return !r->from.stored->copies.empty(); };
      if (std::any_of(batch.begin(), batch.end(), has_copies)) {
        unread = [&](size_t i, const Error& error) { mark_damaged(*batch[i], error); };
      }
      reader.read({}, unread);
      batch.clear();
    };
    for (Reading& reading : pending_) {
      const ItemLocation& at = reading.at();
      reading.damage.reset();
      try {
        check_place(at, reader.open(at.file).size());
      } catch (...) {
        const Error error = current_error();
        if (!is_unreadable(error)) throw named(error, reading);
        mark_damaged(reading, error);
        continue;
      }
      Bytes& item = items_[reading.index];
      item.resize(at.length);
      reader.add({.file = at.file,
                  .begin = at.offset,
                  .size = at.length,
                  .target = item.data(),
                  .key = &reading.from.stored->key});
      batch.push_back(&reading);
      if (reader.full()) read_batch();
    }
    read_batch();
  }

  // Marks the object to be read from another place. Throws if it has no copies.
  void mark_damaged(Reading& reading, const Error& problem) const {
    const Error error = named(problem, reading);
    if (reading.from.stored->copies.empty()) throw error;
    reading.damage = error;
  }

  void check(Reading& reading) {
    if (reading.damage) return;
    const ItemLocation& at = reading.at();
    Bytes& item = items_[reading.index];
    try {
      item = unwrap(context_, at, std::move(item), decoded_limit(at));
      verify_object(context_, at, item);
    } catch (...) {
      const Error error = current_error();
      if (error.code() != ErrorCode::kCorrupt) throw named(error, reading);
      mark_damaged(reading, error);
    }
  }

  // Selects the next place of a damaged object whose file is there. Throws if there is none.
  void choose_next_place(Reading& reading) {
    reading.tried.insert(reading.from.place);
    const StoredObject& object = *reading.from.stored;
    const std::optional<size_t> place = lost_.place_besides(object, reading.tried);
    if (!place) throw *reading.damage;
    warn_of_damage(*reading.damage, object.key, context_.metadata.files[reading.at().file]);
    reading.from.place = *place;
  }

  Error named(Error error, const Reading& reading) const {
    error.with_key(reading.from.stored->key).with_file(context_.metadata.files[reading.at().file]);
    return error;
  }

  const ReadContext& context_;
  LostFiles lost_;
  std::vector<Bytes> items_;
  std::vector<Reading> pending_;  // objects that have not been read intact yet
};

}  // namespace

Bytes read_item(const ReadContext& context, const ItemLocation& at, const std::string& key,
                uint64_t max_size) {
  return with_key_and_file(key, context.metadata.files[at.file], [&] {
    RangeReader reader(context, nullptr);
    check_place(at, reader.open(at.file).size());
    Bytes item(at.length);
    reader.add({.file = at.file, .begin = at.offset, .size = at.length, .target = item.data()});
    reader.read();
    return unwrap(context, at, std::move(item), max_size);
  });
}

std::vector<Bytes> read_objects(const ReadContext& context, std::span<const ObjectRead> objects) {
  return ObjectReader(context, objects).run();
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
  if (bytes <= kUnchecked) return;
  std::map<uint32_t, uint64_t> sizes;
  LostFiles lost(context);
  const auto number = static_cast<uint32_t>(&tensor - context.metadata.tensors.data());
  uint64_t plausible = 0;
  for (const uint32_t index : chunks) {
    const uint32_t place = lost.place_of_chunk(number, index, kNoCopy);
    const ItemLocation& at = context.metadata.place(number, index, place);
    with_key_and_file(tensor.key, context.metadata.files[at.file], [&] {
      auto [size, is_new] = sizes.try_emplace(at.file, 0);
      if (is_new) size->second = open_data(context, at.file)->size();
      check_place(at, size->second);
    });
    const uint64_t factor = at.codec == Codec::kNone ? kViewExpansion : kCodecExpansion;
    const auto more = try_mul(at.length, factor);
    plausible = try_add(plausible, more.value_or(UINT64_MAX)).value_or(UINT64_MAX);
  }
  if (bytes <= plausible) return;
  throw Error(ErrorCode::kCorrupt, "the metadata describes " + std::to_string(bytes) +
                                       " bytes of elements, but the items that should hold them "
                                       "are too small for that")
      .with_key(tensor.key);
}

}  // namespace tilestone::engine
