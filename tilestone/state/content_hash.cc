#include "tilestone/state/content_hash.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/checksum.h"
#include "tilestone/geometry/strided_copy.h"
#include "tilestone/state/value_children.h"

namespace tilestone {
namespace {

bool is_set(const Opaque& opaque) {
  return opaque.kind == Opaque::Kind::kCall && opaque.module == "builtins" &&
         (opaque.name == "set" || opaque.name == "frozenset");
}

constexpr uint64_t kHashedStep = 64u << 10;    // bytes: each step has a hash of its own
constexpr uint64_t kCopiedStep = kHashedStep;  // what is packed at once
constexpr uint64_t kFetchedStep = 8u << 20;    // what is copied from a device at once

void write_node(ByteWriter& out, const TensorView& tensor, const Autograd& autograd) {
  out.u8(static_cast<uint8_t>(tensor.dtype));
  out.varint(tensor.shape.size());
  for (const int64_t n : tensor.shape) out.i64(n);
  out.u8(static_cast<uint8_t>((autograd.parameter ? 2 : 0) | (autograd.requires_grad ? 1 : 0)));
  out.u64(elements_hash(tensor));
}

void write_node(ByteWriter& out, const Opaque& opaque) {
  out.u8(static_cast<uint8_t>(opaque.kind));
  out.string(opaque.module);
  out.string(opaque.name);
  for (const size_t n : {opaque.args.size(), opaque.keywords.size(), opaque.appended.size()}) {
    out.varint(n);
  }
}

void write_blob(ByteWriter& out, ByteView bytes) {
  if (bytes.size() <= kHashedStep) return out.blob(bytes);
  out.varint(bytes.size());
  out.u64(xxh3_64(bytes));
}

// Writes a value's own content, without its children.
void write_node(ByteWriter& out, const Value& value) {
  switch (value.kind()) {
    case Value::Kind::kBool:
      return out.u8(value.as_bool() ? 1 : 0);
    case Value::Kind::kInt:
      return out.i64(value.as_int());
    case Value::Kind::kBigInt:
      return out.blob(value.as_big_int().bytes);
    case Value::Kind::kFloat: {
      uint64_t bits = 0;
      const double number = value.as_float();
      std::memcpy(&bits, &number, sizeof(bits));
      return out.u64(bits);
    }
    case Value::Kind::kString:
      return write_blob(out, as_bytes(value.as_string()));
    case Value::Kind::kBytes:
      return write_blob(out, value.as_bytes());
    case Value::Kind::kDict:
      return out.u8(value.is_ordered_dict() ? 1 : 0);
    case Value::Kind::kDType:
      return out.u8(static_cast<uint8_t>(value.as_dtype()));
    case Value::Kind::kPickled:
      return write_blob(out, value.as_pickled().bytes);
    case Value::Kind::kTensor:
      return write_node(out, value.as_tensor(), value.autograd());
    case Value::Kind::kOpaque:
      return write_node(out, value.as_opaque());
    default:
      return;
  }
}

// Hashes children before parents. A shared value is hashed once.
class Hasher {
 public:
  // `unordered`: its children are the elements of a set.
  uint64_t hash(const Value& value, bool unordered = false) {
    const void* const shared = unordered ? nullptr : value.shared_id();
    const auto known = known_.find(shared);
    if (known != known_.end()) return known->second;
    const bool is_a_set = value.kind() == Value::Kind::kOpaque && is_set(value.as_opaque());
    std::vector<uint64_t> hashes;
    for_each_child(value, [&](const Value& child) {
      const bool elements = is_a_set && hashes.empty() && child.kind() == Value::Kind::kList;
      hashes.push_back(hash(child, elements));
    });
    if (unordered) std::sort(hashes.begin(), hashes.end());
    if (value.kind() == Value::Kind::kDict && !value.is_ordered_dict()) sort_pairs(hashes);
    ByteWriter out;
    out.u8(static_cast<uint8_t>(value.kind()));
    write_node(out, value);
    for (const uint64_t each : hashes) out.u64(each);
    const uint64_t done = std::max<uint64_t>(xxh3_64(std::move(out).take()), 1);
    if (shared != nullptr) known_.emplace(shared, done);
    return done;
  }

 private:
  // Sorts the hashes of a dict's (key, item) pairs. The hash of the dict's attributes stays at the
  // end.
  static void sort_pairs(std::vector<uint64_t>& hashes) {
    std::vector<std::pair<uint64_t, uint64_t>> pairs;
    for (size_t i = 0; i + 1 < hashes.size(); i += 2) pairs.emplace_back(hashes[i], hashes[i + 1]);
    std::sort(pairs.begin(), pairs.end());
    for (size_t i = 0; i < pairs.size(); ++i) {
      hashes[2 * i] = pairs[i].first;
      hashes[2 * i + 1] = pairs[i].second;
    }
  }

  std::unordered_map<const void*, uint64_t> known_;  // by Value::shared_id()
};

}  // namespace

uint64_t content_hash(const Value& value) { return Hasher().hash(value); }

namespace {

// One block is processed while the device copies the next one.
void for_each_block_of_device(const TensorView& tensor, const std::function<void(ByteView)>& take) {
  struct Block {
    Bytes memory;
    MutableByteView part;
    DeviceBatch copy;  // after the memory: it is destroyed, and so waited for, first
  };
  const uint64_t size = tensor.bytes();
  Block blocks[2];
  for (Block& block : blocks) block.memory.resize(std::min(size, kFetchedStep));
  const auto begin_copy = [&](uint64_t begin) {
    if (begin >= size) return;
    Block& block = blocks[begin / kFetchedStep % 2];
    block.part = MutableByteView(block.memory).first(std::min(kFetchedStep, size - begin));
    const DeviceCopy copy{tensor.device, begin, block.part};
    block.copy = DeviceBatch(CopyTo::kHost, {&copy, 1});
  };
  begin_copy(0);
  for (uint64_t begin = 0; begin < size; begin += kFetchedStep) {
    begin_copy(begin + kFetchedStep);
    Block& block = blocks[begin / kFetchedStep % 2];
    block.copy.wait();
    take(block.part);
  }
}

}  // namespace

void for_each_block(const TensorView& tensor, const std::function<void(ByteView)>& take) {
  const uint64_t size = tensor.bytes();
  if (size == 0) return;
  if (tensor.device != nullptr) return for_each_block_of_device(tensor, take);
  if (tensor.strided_view().is_contiguous()) return take({tensor.data, size});
  Bytes block(std::min(size, kCopiedStep));
  for (uint64_t begin = 0; begin < size; begin += kCopiedStep) {
    const MutableByteView part =
        MutableByteView(block).first(static_cast<size_t>(std::min(kCopiedStep, size - begin)));
    pack_range(tensor.strided_view(), begin, part);
    take(part);
  }
}

uint64_t elements_hash(const TensorView& tensor) {
  ByteWriter hashes;
  for_each_block(tensor, [&](ByteView block) {
    for (uint64_t begin = 0; begin < block.size(); begin += kHashedStep) {
      hashes.u64(xxh3_64(block.subspan(begin, std::min(kHashedStep, block.size() - begin))));
    }
  });
  return std::max<uint64_t>(xxh3_64(hashes.bytes()), 1);
}

}  // namespace tilestone
