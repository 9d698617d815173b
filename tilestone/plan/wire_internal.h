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

// Writes successive keys. Each key is written as the number of bytes that it shares with the
// previous key, and the rest. The number is at most 255, which bounds how far a few bytes can
// expand.
class KeyWriter {
 public:
  void write(ByteWriter& out, std::string_view key);

 private:
  std::string last_;
};

class KeyReader {
 public:
  const std::string& read(ByteReader& in);

 private:
  std::string last_;
};

// A path takes one byte per element if its elements are parts of the key.
void write_path(ByteWriter& out, std::string_view key, const Path& path);
Path read_path(ByteReader& in, std::string_view key);

void write_dtype(ByteWriter& out, DType dtype);
DType read_dtype(ByteReader& in);

// A tensor's shape: at most kMaxDims dims, none negative, and at most 2^63 - 1 elements.
inline constexpr uint64_t kMaxDims = 1024;
void write_shape(ByteWriter& out, const Dims& shape);
Dims read_shape(ByteReader& in);

// A box of a tensor of `shape`. The reader throws if the box does not lie inside the tensor.
void write_box(ByteWriter& out, const Box& box);
Box read_box(ByteReader& in, const Dims& shape);
void read_box(ByteReader& in, const Dims& shape, Box& box);  // the same, into an existing box

// Attributes of the kinds and the depth that attribute_bytes() allows. The writer throws as
// described there.
void write_attributes(ByteWriter& out, const Attributes& attributes);
Attributes read_attributes(ByteReader& in);

// An index below `size`.
uint32_t read_index(ByteReader& in, size_t size, std::string_view what);
int read_int(ByteReader& in, std::string_view what);  // 0 to INT_MAX

}  // namespace tilestone::wire
