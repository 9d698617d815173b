#include "tilestone/plan/receipt.h"

#include <algorithm>
#include <bit>
#include <map>
#include <memory>
#include <utility>

#include "tilestone/base/block_sums.h"
#include "tilestone/base/checksum.h"
#include "tilestone/base/named_fields.h"
#include "tilestone/plan/wire_internal.h"

namespace tilestone {
namespace {

constexpr uint8_t kReceiptFormat = 1;
constexpr uint64_t kTrailerSize = 8;

// Optional fields. A receipt only contains those that are not empty.
constexpr std::string_view kAttributes = "attributes";
constexpr std::string_view kBlocks = "blocks";
constexpr std::string_view kContents = "contents";
constexpr std::string_view kCopies = "copies";
constexpr std::string_view kEmptyDicts = "empty_dicts";
constexpr std::string_view kHashes = "hashes";
constexpr std::string_view kHeld = "held";
constexpr std::string_view kHost = "host";
constexpr std::string_view kKeys = "keys";
constexpr std::string_view kObjectCopies = "object_copies";
constexpr std::string_view kOrder = "order";
constexpr std::string_view kParts = "parts";
constexpr std::string_view kShared = "shared";
constexpr std::string_view kState = "state";
constexpr std::string_view kSteps = "steps";

void write_item(ByteWriter& out, const ReceiptItem& item) {
  out.varint(item.file);
  out.varint(item.offset);
  out.varint(item.length);
  out.varint(item.checksums.payload_offset);
  out.u32(item.checksums.payload_crc32);
  out.u32(item.checksums.item_crc32);
}
constexpr uint64_t kMinItemSize = 12;

ReceiptItem read_item(ByteReader& in, const std::vector<ReceiptFile>& files) {
  ReceiptItem item;
  item.file = wire::read_index(in, files.size(), "an item's file");
  item.offset = in.varint();
  item.length = in.varint();
  const uint64_t size = files[item.file].size;
  if (item.offset > size || item.length > size - item.offset) {
    in.fail("an item lies outside its file");
  }
  item.checksums.payload_offset = in.varint();
  if (item.checksums.payload_offset > item.length) in.fail("a payload lies outside its item");
  item.checksums.payload_crc32 = in.u32();
  item.checksums.item_crc32 = in.u32();
  return item;
}

// Returns the bytes before the trailer after verifying their checksum.
ByteView checked_body(ByteView bytes) {
  ByteReader in(bytes, "receipt");
  if (bytes.size() < kTrailerSize) in.fail("it is too short");
  const ByteView body = in.raw(bytes.size() - kTrailerSize);
  if (in.u64() != xxh3_64(body)) in.fail("the checksum does not match");
  return body;
}

void read_files(ByteReader& in, Receipt& receipt) {
  receipt.files.resize(in.count(2));
  for (ReceiptFile& file : receipt.files) {
    file.name = in.string();
    file.size = in.varint();
  }
}

void read_tensors(ByteReader& in, wire::KeyReader& keys, Receipt& receipt) {
  receipt.tensors.resize(in.count(5));
  for (Receipt::Tensor& tensor : receipt.tensors) {
    tensor.key = keys.read(in);
    tensor.path = wire::read_path(in, tensor.key);
    tensor.dtype = wire::read_dtype(in);
    tensor.global_shape = wire::read_shape(in);
  }
}

void write_chunks(ByteWriter& out, const std::vector<Receipt::Chunk>& chunks) {
  out.varint(chunks.size());
  for (const Receipt::Chunk& chunk : chunks) {
    out.varint(chunk.tensor);
    wire::write_box(out, chunk.box);
    write_item(out, chunk.at);
  }
}

void read_chunks(ByteReader& in, const Receipt& receipt, std::vector<Receipt::Chunk>& chunks) {
  chunks.resize(in.count(1 + kMinItemSize));
  for (Receipt::Chunk& chunk : chunks) {
    chunk.tensor = wire::read_index(in, receipt.tensors.size(), "a chunk's tensor");
    chunk.box = wire::read_box(in, receipt.tensors[chunk.tensor].global_shape);
    chunk.at = read_item(in, receipt.files);
  }
}

void read_object(ByteReader& in, wire::KeyReader& keys, const Receipt& receipt,
                 Receipt::Object& object) {
  object.key = keys.read(in);
  object.path = wire::read_path(in, object.key);
  object.at = read_item(in, receipt.files);
}

void read_objects(ByteReader& in, wire::KeyReader& keys, Receipt& receipt) {
  receipt.objects.resize(in.count(3 + kMinItemSize));
  for (Receipt::Object& object : receipt.objects) read_object(in, keys, receipt, object);
}

void write_object(ByteWriter& out, wire::KeyWriter& keys, const Receipt::Object& object) {
  keys.write(out, object.key);
  wire::write_path(out, object.key, object.path);
  write_item(out, object.at);
}

Bytes encode_contents(const Receipt& receipt) {
  ByteWriter out;
  for (const Receipt::Object& object : receipt.objects) out.u64(object.content);
  return std::move(out).take();
}

void read_contents(ByteReader& in, Receipt& receipt) {
  for (Receipt::Object& object : receipt.objects) object.content = in.u64();
}

Bytes encode_object_copies(const Receipt& receipt) {
  ByteWriter out;
  wire::KeyWriter keys;
  out.varint(receipt.object_copies.size());
  for (const Receipt::Object& object : receipt.object_copies) {
    write_object(out, keys, object);
    out.u64(object.content);
  }
  return std::move(out).take();
}

void read_object_copies(ByteReader& in, Receipt& receipt) {
  wire::KeyReader keys;
  receipt.object_copies.resize(in.count(3 + kMinItemSize + sizeof(uint64_t)));
  for (Receipt::Object& object : receipt.object_copies) {
    read_object(in, keys, receipt, object);
    object.content = in.u64();
  }
}

Bytes encode_copies(const Receipt& receipt) {
  ByteWriter out;
  write_chunks(out, receipt.copies);
  return std::move(out).take();
}

// Copies have the blocks of their chunks, so their blocks are not written.
Bytes encode_blocks(const Receipt& receipt) {
  ByteWriter out;
  for (size_t i = 0; i < receipt.chunks.size(); ++i) {
    const BlockSums* const blocks = receipt.chunks[i].at.checksums.blocks.get();
    if (blocks == nullptr) continue;
    out.varint(i);
    out.varint(blocks->bytes);
    out.varint(blocks->block_bytes);
    for (const uint32_t crc : blocks->crc32) out.u32(crc);
  }
  return std::move(out).take();
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

void read_blocks(ByteReader& in, Receipt& receipt) {
  for (uint64_t next = 0; in.remaining() > 0;) {
    const uint32_t chunk = wire::read_index(in, receipt.chunks.size(), "a block's chunk");
    if (chunk < next) in.fail("the chunks of blocks are not in ascending order");
    next = uint64_t{chunk} + 1;
    ReceiptItem& at = receipt.chunks[chunk].at;
    at.checksums.blocks = std::make_shared<const BlockSums>(read_block_sums(in, at));
  }
}

// The chunk with this number, or the copy: copies follow the chunks.
template <typename R>
auto& item_at(R& receipt, size_t i) {
  const size_t chunks = receipt.chunks.size();
  return (i < chunks ? receipt.chunks[i] : receipt.copies[i - chunks]).at;
}

Bytes encode_hashes(const Receipt& receipt) {
  ByteWriter out;
  for (size_t i = 0; i < receipt.chunks.size() + receipt.copies.size(); ++i) {
    const Hash128& hash = item_at(receipt, i).hash;
    if (!hash) continue;
    out.varint(i);
    out.u64(hash.low);
    out.u64(hash.high);
  }
  return std::move(out).take();
}

void read_hashes(ByteReader& in, Receipt& receipt) {
  const size_t items = receipt.chunks.size() + receipt.copies.size();
  for (uint64_t next = 0; in.remaining() > 0;) {
    const uint32_t item = wire::read_index(in, items, "a hash's chunk");
    if (item < next) in.fail("the chunks of hashes are not in ascending order");
    next = uint64_t{item} + 1;
    Hash128& hash = item_at(receipt, item).hash;
    hash.low = in.u64();
    hash.high = in.u64();
    if (!hash) in.fail("a hash is zero");
  }
}

Bytes encode_shared(const Receipt& receipt) {
  ByteWriter out;
  for (size_t i = 0; i < receipt.files.size(); ++i) {
    if (receipt.files[i].steps == 0) continue;
    out.varint(i);
    out.varint(receipt.files[i].steps);
  }
  return std::move(out).take();
}

void read_shared(ByteReader& in, Receipt& receipt) {
  for (uint64_t next = 0; in.remaining() > 0;) {
    const uint32_t file = wire::read_index(in, receipt.files.size(), "a shared file");
    if (file < next) in.fail("shared files are not in ascending order");
    next = uint64_t{file} + 1;
    const int steps = wire::read_int(in, "the number of steps that share a file");
    if (steps == 0) in.fail("a shared file is in no step");
    receipt.files[file].steps = static_cast<uint32_t>(steps);
  }
}

Bytes encode_parts(const Receipt& receipt) {
  ByteWriter out;
  out.varint(receipt.parts.size());
  for (const Receipt::FilePart& part : receipt.parts) {
    out.varint(part.file);
    out.varint(part.offset);
    out.varint(part.length);
    out.u32(part.crc32);
  }
  return std::move(out).take();
}

void read_parts(ByteReader& in, Receipt& receipt) {
  receipt.parts.resize(in.count(7));
  for (Receipt::FilePart& part : receipt.parts) {
    part.file = wire::read_index(in, receipt.files.size(), "a part's file");
    part.offset = in.varint();
    part.length = in.varint();
    part.crc32 = in.u32();
    const uint64_t size = receipt.files[part.file].size;
    if (part.offset > size || part.length > size - part.offset) {
      in.fail("a part lies outside its file");
    }
  }
}

Bytes encode_attributes(const Receipt& receipt) {
  ByteWriter out;
  out.varint(receipt.attributes.size());
  for (const auto& [tensor, attributes] : receipt.attributes) {
    out.varint(tensor);
    wire::write_attributes(out, attributes);
  }
  return std::move(out).take();
}

void read_attributes(ByteReader& in, Receipt& receipt) {
  for (uint64_t left = in.count(2); left > 0; --left) {
    const uint32_t tensor = wire::read_index(in, receipt.tensors.size(), "an attribute's tensor");
    if (!receipt.attributes.empty() && tensor <= receipt.attributes.rbegin()->first) {
      in.fail("the tensors of attributes are not in ascending order");
    }
    receipt.attributes.emplace_hint(receipt.attributes.end(), tensor, wire::read_attributes(in));
  }
}

bool is_empty_dict(const TreeKeys::value_type& dict) { return dict.second.empty; }

// Of the dicts that are not empty.
Bytes encode_keys(const Receipt& receipt) {
  ByteWriter out;
  const TreeKeys& dicts = receipt.dict_keys;
  out.varint(dicts.size() -
             static_cast<uint64_t>(std::count_if(dicts.begin(), dicts.end(), is_empty_dict)));
  for (const auto& [path, keys] : dicts) {
    if (keys.empty) continue;
    wire::write_path(out, "", path);
    out.u8(keys.ints ? 1 : 0);
    wire::write_attributes(out, keys.others);
  }
  return std::move(out).take();
}

// Adds them to the empty dicts, which are an earlier field.
void read_keys(ByteReader& in, TreeKeys& dicts) {
  const Path* last = nullptr;
  for (uint64_t left = in.count(3); left > 0; --left) {
    Path path = wire::read_path(in, "");
    const uint8_t ints = in.u8();
    if (ints > 1) in.fail("keys have an unknown encoding");
    if (last != nullptr && path <= *last) {
      in.fail("the dicts with keys are not in ascending order");
    }
    const auto [added, is_new] =
        dicts.emplace(std::move(path), DictKeys{ints == 1, wire::read_attributes(in), false});
    if (!is_new) in.fail("a dict with keys is listed as empty");
    last = &added->first;
  }
}

Bytes encode_empty_dicts(const Receipt& receipt) {
  ByteWriter out;
  const TreeKeys& dicts = receipt.dict_keys;
  out.varint(static_cast<uint64_t>(std::count_if(dicts.begin(), dicts.end(), is_empty_dict)));
  for (const auto& [path, keys] : dicts) {
    if (keys.empty) wire::write_path(out, "", path);
  }
  return std::move(out).take();
}

void read_empty_dicts(ByteReader& in, TreeKeys& dicts) {
  for (uint64_t left = in.count(1); left > 0; --left) {
    Path path = wire::read_path(in, "");
    if (!dicts.empty() && path <= dicts.rbegin()->first) {
      in.fail("the empty dicts are not in ascending order");
    }
    dicts.emplace_hint(dicts.end(), std::move(path), DictKeys{false, {}, true});
  }
}

// Calls visit(order) for the tensors, the objects and the empty dicts, and returns how many of them
// have a place other than 0.
template <typename R, typename Visit>
size_t for_each_order(R& receipt, const Visit& visit) {
  size_t placed = 0;
  const auto at = [&](auto& order) {
    visit(order);
    placed += order != 0 ? 1 : 0;
  };
  for (auto& tensor : receipt.tensors) at(tensor.order);
  for (auto& object : receipt.objects) at(object.order);
  for (auto& [path, keys] : receipt.dict_keys) {
    if (keys.empty) at(keys.order);
  }
  return placed;
}

// Each is stored as the difference to the one before; negative ones are odd numbers.
Bytes encode_order(const Receipt& receipt) {
  ByteWriter out;
  int64_t last = 0;
  const size_t placed = for_each_order(receipt, [&](const uint32_t& order) {
    const int64_t by = int64_t{order} - last;
    out.varint(static_cast<uint64_t>(by < 0 ? -2 * by - 1 : 2 * by));
    last = order;
  });
  return placed == 0 ? Bytes() : std::move(out).take();
}

void read_order(ByteReader& in, Receipt& receipt) {
  int64_t last = 0;
  for_each_order(receipt, [&](uint32_t& order) {
    const uint64_t by = in.varint();
    if (by / 2 > UINT32_MAX) in.fail("a position among the leaves is out of range");
    const auto distance = static_cast<int64_t>(by / 2);
    last += by % 2 == 0 ? distance : -distance - 1;
    if (last < 0 || last > int64_t{UINT32_MAX})
      in.fail("a position among the leaves is out of range");
    order = static_cast<uint32_t>(last);
  });
}

Bytes encode_held(const Receipt& receipt) {
  ByteWriter out;
  out.varint(receipt.held.size());
  for (const Receipt::Held& held : receipt.held) {
    out.u64(held.holders);
    out.varint(held.ranks);
    out.varint(held.parts);
    out.u64(held.content);
  }
  return std::move(out).take();
}

void read_held(ByteReader& in, Receipt& receipt) {
  receipt.held.resize(in.count(18));
  for (Receipt::Held& held : receipt.held) {
    held.holders = in.u64();
    held.ranks = static_cast<uint32_t>(wire::read_int(in, "the number of holders"));
    held.parts = static_cast<uint32_t>(wire::read_int(in, "the number of shards"));
    held.content = in.u64();
  }
}

Bytes encode_steps(const Receipt& receipt) {
  ByteWriter out;
  out.varint(receipt.steps.size());
  for (const Receipt::Step& step : receipt.steps) {
    out.string(step.name);
    out.u64(step.began);
    out.varint(step.microseconds);
  }
  return std::move(out).take();
}

void read_steps(ByteReader& in, Receipt& receipt) {
  receipt.steps.resize(in.count(10));
  for (Receipt::Step& step : receipt.steps) {
    step.name = in.string();
    step.began = in.u64();
    step.microseconds = in.varint();
  }
}

std::vector<NamedField> optional_fields(const Receipt& receipt) {
  std::vector<NamedField> fields;
  const auto add = [&](std::string_view name, Bytes value) {
    fields.emplace_back(std::string(name), std::move(value));
  };
  if (!receipt.attributes.empty()) add(kAttributes, encode_attributes(receipt));
  if (Bytes blocks = encode_blocks(receipt); !blocks.empty()) add(kBlocks, std::move(blocks));
  const auto noted = [](const Receipt::Object& object) { return object.content != 0; };
  if (std::any_of(receipt.objects.begin(), receipt.objects.end(), noted)) {
    add(kContents, encode_contents(receipt));
  }
  if (!receipt.copies.empty()) add(kCopies, encode_copies(receipt));
  const auto& dicts = receipt.dict_keys;
  const auto empty = std::count_if(dicts.begin(), dicts.end(), is_empty_dict);
  if (empty > 0) add(kEmptyDicts, encode_empty_dicts(receipt));
  if (Bytes hashes = encode_hashes(receipt); !hashes.empty()) add(kHashes, std::move(hashes));
  if (!receipt.held.empty()) add(kHeld, encode_held(receipt));
  if (!receipt.host.empty()) add(kHost, to_bytes(receipt.host));
  if (std::ssize(dicts) > empty) add(kKeys, encode_keys(receipt));
  if (!receipt.object_copies.empty()) add(kObjectCopies, encode_object_copies(receipt));
  if (Bytes order = encode_order(receipt); !order.empty()) add(kOrder, std::move(order));
  if (!receipt.parts.empty()) add(kParts, encode_parts(receipt));
  if (Bytes shared = encode_shared(receipt); !shared.empty()) add(kShared, std::move(shared));
  if (receipt.state != 0) {
    ByteWriter out;
    out.u64(receipt.state);
    add(kState, std::move(out).take());
  }
  if (!receipt.steps.empty()) add(kSteps, encode_steps(receipt));
  return fields;
}

void read_optional_field(std::string_view name, ByteView value, Receipt& receipt) {
  if (name == kHost) {
    receipt.host = as_text(value);
    return;
  }
  ByteReader in(value, "receipt: " + std::string(name));
  if (name == kAttributes) {
    read_attributes(in, receipt);
  } else if (name == kBlocks) {
    read_blocks(in, receipt);
  } else if (name == kContents) {
    read_contents(in, receipt);
  } else if (name == kCopies) {
    read_chunks(in, receipt, receipt.copies);
  } else if (name == kEmptyDicts) {
    read_empty_dicts(in, receipt.dict_keys);
  } else if (name == kHashes) {
    read_hashes(in, receipt);
  } else if (name == kHeld) {
    read_held(in, receipt);
  } else if (name == kKeys) {
    read_keys(in, receipt.dict_keys);
  } else if (name == kObjectCopies) {
    read_object_copies(in, receipt);
  } else if (name == kOrder) {
    read_order(in, receipt);
  } else if (name == kParts) {
    read_parts(in, receipt);
  } else if (name == kShared) {
    read_shared(in, receipt);
  } else if (name == kState) {
    receipt.state = in.u64();
  } else if (name == kSteps) {
    read_steps(in, receipt);
  } else {
    return;  // from a later version
  }
  in.expect_end();
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
  out.varint(static_cast<uint64_t>(rank));
  out.varint(static_cast<uint64_t>(world_size));
  out.string(save_id);
  out.varint(files.size());
  for (const ReceiptFile& file : files) {
    out.string(file.name);
    out.varint(file.size);
  }
  wire::KeyWriter keys;
  out.varint(tensors.size());
  for (const Tensor& tensor : tensors) {
    keys.write(out, tensor.key);
    wire::write_path(out, tensor.key, tensor.path);
    wire::write_dtype(out, tensor.dtype);
    wire::write_shape(out, tensor.global_shape);
  }
  write_chunks(out, chunks);
  out.varint(objects.size());
  for (const Object& object : objects) write_object(out, keys, object);
  write_named_fields(out, optional_fields(*this));
  out.u64(xxh3_64(out.bytes()));
  return std::move(out).take();
}

Receipt Receipt::decode(ByteView bytes) {
  ByteReader in(checked_body(bytes), "receipt");
  if (in.u8() != kReceiptFormat) in.fail("the version is unknown");
  Receipt receipt;
  receipt.rank = wire::read_int(in, "the rank");
  receipt.world_size = wire::read_int(in, "the world size");
  if (receipt.rank >= receipt.world_size) in.fail("the rank is not less than the world size");
  receipt.save_id = in.string();
  read_files(in, receipt);
  wire::KeyReader keys;
  read_tensors(in, keys, receipt);
  read_chunks(in, receipt, receipt.chunks);
  read_objects(in, keys, receipt);
  read_named_fields(in, [&](std::string_view name, ByteView value) {
    read_optional_field(name, value, receipt);
  });
  return receipt;
}

}  // namespace tilestone
