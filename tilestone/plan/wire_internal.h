// Parts of the encodings of plans and receipts: keys with shared prefixes, dims, boxes.
#pragma once

#include <string>
#include <string_view>

#include "tilestone/base/bytes.h"
#include "tilestone/base/dtype.h"
#include "tilestone/geometry/box.h"
#include "tilestone/state/metadata.h"
#include "tilestone/state/state_dict.h"

namespace tilestone::wire {

// Successive keys, written or read. Each key is written as the number of bytes that it shares with
// the previous key, and the rest. The number is at most 255, which bounds how far a few bytes can
// expand.
class Keys {
 public:
  void walk(ByteWriter& out, std::string_view key);
  void walk(ByteReader& in, std::string& key);

 private:
  std::string last_;
};

// As the functions of base/both_ways.h. A path takes one byte per element if its elements are parts
// of the key.
void path(ByteWriter& out, std::string_view key, const Path& path);
void path(ByteReader& in, std::string_view key, Path& path);

void dtype(ByteWriter& out, DType dtype);
void dtype(ByteReader& in, DType& dtype);

// A tensor's shape: at most kMaxDims dims, none negative, and at most 2^63 - 1 elements.
inline constexpr uint64_t kMaxDims = 1024;
void shape(ByteWriter& out, const Dims& shape);
void shape(ByteReader& in, Dims& shape);

// A box of a tensor of `shape`. The reader throws if the box does not lie inside the tensor.
void box(ByteWriter& out, const Dims& shape, const Box& box);
void box(ByteReader& in, const Dims& shape, Box& box);

// Attributes of the kinds and the depth that attribute_bytes() allows. The writer throws as
// described there.
void write_attributes(ByteWriter& out, const Attributes& attributes);
Attributes read_attributes(ByteReader& in);

// An index below `size`.
inline void index_below(ByteWriter& out, uint32_t index, size_t, std::string_view) {
  out.varint(index);
}
void index_below(ByteReader& in, uint32_t& index, size_t size, std::string_view what);

}  // namespace tilestone::wire
