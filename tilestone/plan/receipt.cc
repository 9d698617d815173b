#include "tilestone/plan/receipt.h"

#include <algorithm>
#include <bit>
#include <memory>
#include <string_view>
#include <utility>

#include "tilestone/base/block_sums.h"
#include "tilestone/base/both_ways.h"
#include "tilestone/base/checksum.h"
#include "tilestone/base/named_fields.h"
#include "tilestone/plan/wire_internal.h"

namespace tilestone {
namespace {

using both::kReads;

constexpr uint8_t kReceiptFormat = 1;
constexpr uint64_t kTrailerSize = 8;

// ---- What a receipt consists of. `io` writes a constant receipt, or reads into one (both_ways.h).

void expect_in_file(ByteWriter&, const auto&, const std::vector<ReceiptFile>&, std::string_view) {}
void expect_in_file(ByteReader& in, const auto& part, const std::vector<ReceiptFile>& files,
                    std::string_view what) {
  const uint64_t size = files[part.file].size;
  if (part.offset > size || part.length > size - part.offset) {
    in.fail(std::string(what) + " lies outside its file");
  }
}

constexpr uint64_t kMinItemSize = 12;

void walk_item(auto& io, auto& item, const std::vector<ReceiptFile>& files) {
  wire::index_below(io, item.file, files.size(), "an item's file");
  both::varint(io, item.offset);
  both::varint(io, item.length);
  expect_in_file(io, item, files, "an item");
  auto& sums = item.checksums;
  both::varint(io, sums.payload_offset);
  both::expect(io, sums.payload_offset <= item.length, "a payload lies outside its item");
  both::u32(io, sums.payload_crc32);
  both::u32(io, sums.item_crc32);
}

void walk_chunks(auto& io, auto& receipt, auto& chunks) {
  both::each(io, chunks, 1 + kMinItemSize, [&](auto& chunk) {
    wire::index_below(io, chunk.tensor, receipt.tensors.size(), "a chunk's tensor");
    wire::box(io, receipt.tensors[chunk.tensor].global_shape, chunk.box);
    walk_item(io, chunk.at, receipt.files);
  });
}

void walk_object(auto& io, wire::Keys& keys, auto& receipt, auto& object) {
  keys.walk(io, object.key);
  wire::path(io, object.key, object.path);
  walk_item(io, object.at, receipt.files);
}

// All but the optional fields.
void walk_receipt(auto& io, auto& receipt) {
  both::varint(io, receipt.rank);
  both::varint(io, receipt.world_size);
  both::expect(io, receipt.rank < receipt.world_size, "the rank is not less than the world size");
  both::text(io, receipt.save_id);
  both::each(io, receipt.files, 2, [&](auto& file) {
    both::text(io, file.name);
    both::varint(io, file.size);
  });
  wire::Keys keys;
  both::each(io, receipt.tensors, 5, [&](auto& tensor) {
    keys.walk(io, tensor.key);
    wire::path(io, tensor.key, tensor.path);
    wire::dtype(io, tensor.dtype);
    wire::shape(io, tensor.global_shape);
  });
  walk_chunks(io, receipt, receipt.chunks);
  both::each(io, receipt.objects, 3 + kMinItemSize,
             [&](auto& object) { walk_object(io, keys, receipt, object); });
}

// ---- Optional fields

// What some of `count` things have: the number of each, in ascending order, and walk(number).
template <typename Io, typename Has, typename Walk>
void walk_some(Io& io, size_t count, std::string_view what, const Has& has, const Walk& walk) {
  uint32_t i = 0;
  if constexpr (kReads<Io>) {
    for (uint64_t next = 0; io.remaining() > 0; next = uint64_t{i} + 1) {
      wire::index_below(io, i, count, what);
      if (i < next) io.fail(std::string(what) + " is not in ascending order");
      walk(i);
    }
  } else {
    for (; i < count; ++i) {
      if (!has(i)) continue;
      io.varint(i);
      walk(i);
    }
  }
}

BlockSums read_block_sums(ByteReader& in, const ReceiptItem& item) {
  BlockSums sums;
  sums.bytes = in.varint();
  if (sums.bytes > item.length - item.checksums.payload_offset) {
    in.fail("a payload lies outside its item");
  }
  sums.block_bytes = in.varint();
  if (!std::has_single_bit(sums.block_bytes) || sums.block_bytes < BlockSums::kLeastBlock ||
      sums.block_bytes > BlockSums::kMaxBlock) {
    in.fail("the size of a payload's blocks is invalid");
  }
  const uint64_t count = block_count(sums.bytes, sums.block_bytes);
  if (count < 2) in.fail("a payload of one block has a list of blocks");
  if (count > in.remaining() / sizeof(uint32_t)) in.fail("a payload's list of blocks is too short");
  sums.crc32.reserve(count);
  for (uint64_t i = 0; i < count; ++i) sums.crc32.push_back(in.u32());
  return sums;
}

void walk_block_sums(ByteWriter& out, const ReceiptItem& item) {
  const BlockSums& sums = *item.checksums.blocks;
  out.varint(sums.bytes);
  out.varint(sums.block_bytes);
  for (const uint32_t crc : sums.crc32) out.u32(crc);
}
void walk_block_sums(ByteReader& in, ReceiptItem& item) {
  item.checksums.blocks = std::make_shared<const BlockSums>(read_block_sums(in, item));
}

// Copies have the blocks of their chunks, so their blocks are not written.
void walk_blocks(auto& io, auto& receipt) {
  auto& chunks = receipt.chunks;
  walk_some(
      io, chunks.size(), "a block's chunk",
      [&](uint32_t i) { return chunks[i].at.checksums.blocks != nullptr; },
      [&](uint32_t i) { walk_block_sums(io, chunks[i].at); });
}

// Of the chunks and then the copies.
void walk_hashes(auto& io, auto& receipt) {
  const size_t chunks = receipt.chunks.size();
  const auto hash_of = [&](size_t i) -> auto& {
    return (i < chunks ? receipt.chunks[i] : receipt.copies[i - chunks]).at.hash;
  };
  walk_some(
      io, chunks + receipt.copies.size(), "a hash's chunk",
      [&](uint32_t i) { return static_cast<bool>(hash_of(i)); },
      [&](uint32_t i) {
        both::u64(io, hash_of(i).low);
        both::u64(io, hash_of(i).high);
        both::expect(io, static_cast<bool>(hash_of(i)), "a hash is zero");
      });
}

void walk_shared(auto& io, auto& receipt) {
  auto& files = receipt.files;
  walk_some(
      io, files.size(), "a shared file", [&](uint32_t i) { return files[i].steps != 0; },
      [&](uint32_t i) {
        both::varint(io, files[i].steps);
        both::expect(io, files[i].steps != 0, "a shared file is in no step");
      });
}

void walk_object_copies(auto& io, auto& receipt) {
  wire::Keys keys;
  both::each(io, receipt.object_copies, 3 + kMinItemSize + sizeof(uint64_t), [&](auto& object) {
    walk_object(io, keys, receipt, object);
    both::u64(io, object.content);
  });
}

void walk_parts(auto& io, auto& receipt) {
  both::each(io, receipt.parts, 7, [&](auto& part) {
    wire::index_below(io, part.file, receipt.files.size(), "a part's file");
    both::varint(io, part.offset);
    both::varint(io, part.length);
    both::u32(io, part.crc32);
    expect_in_file(io, part, receipt.files, "a part");
  });
}

void walk_attributes(ByteWriter& out, const Receipt& receipt) {
  out.varint(receipt.attributes.size());
  for (const auto& [tensor, attributes] : receipt.attributes) {
    out.varint(tensor);
    wire::write_attributes(out, attributes);
  }
}
void walk_attributes(ByteReader& in, Receipt& receipt) {
  uint32_t tensor = 0;
  for (uint64_t left = in.count(2); left > 0; --left) {
    wire::index_below(in, tensor, receipt.tensors.size(), "an attribute's tensor");
    if (!receipt.attributes.empty() && tensor <= receipt.attributes.rbegin()->first) {
      in.fail("the tensors of attributes are not in ascending order");
    }
    receipt.attributes.emplace_hint(receipt.attributes.end(), tensor, wire::read_attributes(in));
  }
}

bool is_empty_dict(const TreeKeys::value_type& dict) { return dict.second.empty; }
uint64_t empty_dicts_of(const TreeKeys& dicts) {
  return static_cast<uint64_t>(std::count_if(dicts.begin(), dicts.end(), is_empty_dict));
}

// Of the dicts that are not empty.
void walk_keys(ByteWriter& out, const Receipt& receipt) {
  out.varint(receipt.dict_keys.size() - empty_dicts_of(receipt.dict_keys));
  for (const auto& [path, keys] : receipt.dict_keys) {
    if (keys.empty) continue;
    wire::path(out, "", path);
    out.u8(keys.ints ? 1 : 0);
    wire::write_attributes(out, keys.others);
  }
}
// Adds them to the empty dicts, which are an earlier field.
void walk_keys(ByteReader& in, Receipt& receipt) {
  const Path* last = nullptr;
  for (uint64_t left = in.count(3); left > 0; --left) {
    Path path;
    wire::path(in, "", path);
    const uint8_t ints = in.u8();
    if (ints > 1) in.fail("keys have an unknown encoding");
    if (last != nullptr && path <= *last) {
      in.fail("the dicts with keys are not in ascending order");
    }
    const auto [added, is_new] = receipt.dict_keys.emplace(
        std::move(path), DictKeys{ints == 1, wire::read_attributes(in), false});
    if (!is_new) in.fail("a dict with keys is listed as empty");
    last = &added->first;
  }
}

void walk_empty_dicts(ByteWriter& out, const Receipt& receipt) {
  out.varint(empty_dicts_of(receipt.dict_keys));
  for (const auto& [path, keys] : receipt.dict_keys) {
    if (keys.empty) wire::path(out, "", path);
  }
}
void walk_empty_dicts(ByteReader& in, Receipt& receipt) {
  TreeKeys& dicts = receipt.dict_keys;
  for (uint64_t left = in.count(1); left > 0; --left) {
    Path path;
    wire::path(in, "", path);
    if (!dicts.empty() && path <= dicts.rbegin()->first) {
      in.fail("the empty dicts are not in ascending order");
    }
    dicts.emplace_hint(dicts.end(), std::move(path), DictKeys{false, {}, true});
  }
}

// Each place is stored as the difference to the one before; negative ones are odd numbers.
void walk_place(ByteWriter& out, int64_t& last, uint32_t place) {
  const int64_t by = int64_t{place} - last;
  out.varint(static_cast<uint64_t>(by < 0 ? -2 * by - 1 : 2 * by));
  last = place;
}
void walk_place(ByteReader& in, int64_t& last, uint32_t& place) {
  const uint64_t by = in.varint();
  const auto distance = static_cast<int64_t>(by / 2);
  if (by / 2 <= UINT32_MAX) last += by % 2 == 0 ? distance : -distance - 1;
  if (by / 2 > UINT32_MAX || last < 0 || last > int64_t{UINT32_MAX}) {
    in.fail("a position among the leaves is out of range");
  }
  place = static_cast<uint32_t>(last);
}

// Of the tensors, the objects and the empty dicts.
void walk_order(auto& io, auto& receipt) {
  int64_t last = 0;
  for (auto& tensor : receipt.tensors) walk_place(io, last, tensor.order);
  for (auto& object : receipt.objects) walk_place(io, last, object.order);
  for (auto& [path, keys] : receipt.dict_keys) {
    if (keys.empty) walk_place(io, last, keys.order);
  }
}

void walk_held(auto& io, auto& receipt) {
  both::each(io, receipt.held, 18, [&](auto& held) {
    both::u64(io, held.holders);
    both::varint(io, held.ranks);
    both::varint(io, held.parts);
    both::u64(io, held.content);
  });
}

void walk_steps(auto& io, auto& receipt) {
  both::each(io, receipt.steps, 10, [&](auto& step) {
    both::text(io, step.name);
    both::u64(io, step.began);
    both::varint(io, step.microseconds);
  });
}

struct Field {
  std::string_view name;
  void (*encode)(ByteWriter&, const Receipt&);
  void (*decode)(ByteReader&, Receipt&);
};

template <typename Walk>
constexpr Field row(std::string_view name, Walk) {
  return {name, [](ByteWriter& out, const Receipt& receipt) { Walk{}(out, receipt); },
          [](ByteReader& in, Receipt& receipt) { Walk{}(in, receipt); }};
}

// In the order of their names. A field of which every byte is 0 says nothing and is left out.
constexpr Field kFields[] = {
    row("attributes", [](auto& io, auto& r) { walk_attributes(io, r); }),
    row("blocks", [](auto& io, auto& r) { walk_blocks(io, r); }),
    row("contents",
        [](auto& io, auto& r) {
          for (auto& object : r.objects) both::u64(io, object.content);
        }),
    row("copies", [](auto& io, auto& r) { walk_chunks(io, r, r.copies); }),
    row("empty_dicts", [](auto& io, auto& r) { walk_empty_dicts(io, r); }),
    row("hashes", [](auto& io, auto& r) { walk_hashes(io, r); }),
    row("held", [](auto& io, auto& r) { walk_held(io, r); }),
    row("host", [](auto& io, auto& r) { both::tail(io, r.host); }),
    row("keys", [](auto& io, auto& r) { walk_keys(io, r); }),
    row("object_copies", [](auto& io, auto& r) { walk_object_copies(io, r); }),
    row("order", [](auto& io, auto& r) { walk_order(io, r); }),
    row("parts", [](auto& io, auto& r) { walk_parts(io, r); }),
    row("shared", [](auto& io, auto& r) { walk_shared(io, r); }),
    row("state", [](auto& io, auto& r) { both::u64(io, r.state); }),
    row("steps", [](auto& io, auto& r) { walk_steps(io, r); }),
};

std::vector<NamedField> optional_fields(const Receipt& receipt) {
  std::vector<NamedField> fields;
  for (const Field& field : kFields) {
    ByteWriter out;
    field.encode(out, receipt);
    const auto is_0 = [](std::byte byte) { return byte == std::byte{0}; };
    if (std::ranges::all_of(out.bytes(), is_0)) continue;
    fields.emplace_back(field.name, std::move(out).take());
  }
  return fields;
}

void read_optional_field(std::string_view name, ByteView value, Receipt& receipt) {
  const auto* const field = std::ranges::find(kFields, name, &Field::name);
  if (field == std::end(kFields)) return;  // from a later version
  ByteReader in(value, "receipt: " + std::string(name));
  field->decode(in, receipt);
  in.expect_end();
}

// Returns the bytes before the trailer after verifying their checksum.
ByteView checked_body(ByteView bytes) {
  ByteReader in(bytes, "receipt");
  if (bytes.size() < kTrailerSize) in.fail("it is too short");
  const ByteView body = in.raw(bytes.size() - kTrailerSize);
  if (in.u64() != xxh3_64(body)) in.fail("the checksum does not match");
  return body;
}

}  // namespace

uint64_t attribute_bytes(const Attributes& attributes) {
  ByteWriter out;
  wire::write_attributes(out, attributes);
  return out.size();
}

Bytes Receipt::encode() const {
  ByteWriter out;
  out.reserve(64 * (tensors.size() + chunks.size() + objects.size() + files.size() + 1));
  out.u8(kReceiptFormat);
  walk_receipt(out, *this);
  write_named_fields(out, optional_fields(*this));
  out.u64(xxh3_64(out.bytes()));
  return std::move(out).take();
}

Receipt Receipt::decode(ByteView bytes) {
  ByteReader in(checked_body(bytes), "receipt");
  if (in.u8() != kReceiptFormat) in.fail("the version is unknown");
  Receipt receipt;
  walk_receipt(in, receipt);
  read_named_fields(in, [&](std::string_view name, ByteView value) {
    read_optional_field(name, value, receipt);
  });
  return receipt;
}

}  // namespace tilestone
