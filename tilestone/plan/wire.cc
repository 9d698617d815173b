#include <algorithm>
#include <limits>
#include <optional>

#include "tilestone/base/number_text.h"
#include "tilestone/plan/wire_internal.h"

namespace tilestone::wire {
namespace {

constexpr size_t kMaxShared = 255;

// How a path is encoded.
constexpr uint8_t kEmptyPath = 0;
constexpr uint8_t kPathInKey = 1;    // each element: length * 2 + is_int, cut from the key
constexpr uint8_t kPathSpelled = 2;  // each element: 0 and a string, or 1 and an int

uint64_t read_int63(ByteReader& in) {
  const uint64_t value = in.varint();
  if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    in.fail("a number is larger than 2^63 - 1");
  }
  return value;
}

Path read_path_in_key(ByteReader& in, std::string_view key) {
  Path path;
  size_t at = 0;
  const uint64_t count = in.count();
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t word = in.varint();
    if (i > 0 && (at >= key.size() || key[at++] != '.')) in.fail("a path does not fit its key");
    if (word / 2 > key.size() - at) in.fail("a path is longer than its key");
    const std::string_view text = key.substr(at, word / 2);
    at += text.size();
    if (word % 2 == 0) {
      path.emplace_back(std::in_place_type<std::string>, text);
      continue;
    }
    const auto value = number_in<int64_t>(text);
    if (!value) in.fail("a path's index is not a number");
    path.emplace_back(std::in_place_type<int64_t>, *value);
  }
  return path;
}

Path read_spelled_path(ByteReader& in) {
  Path path;
  const uint64_t count = in.count(2);
  for (uint64_t i = 0; i < count; ++i) {
    const uint8_t kind = in.u8();
    if (kind > 1) in.fail("a path's element is neither text nor int");
    if (kind == 0) {
      path.emplace_back(std::in_place_type<std::string>, in.string());
    } else {
      path.emplace_back(std::in_place_type<int64_t>, in.i64());
    }
  }
  return path;
}

}  // namespace

void Keys::walk(ByteWriter& out, std::string_view key) {
  const size_t most = std::min({key.size(), last_.size(), kMaxShared});
  size_t shared = 0;
  while (shared < most && key[shared] == last_[shared]) ++shared;
  out.varint(shared);
  out.string(key.substr(shared));
  last_ = key;
}

void Keys::walk(ByteReader& in, std::string& key) {
  const uint64_t shared = in.varint();
  if (shared > std::min(last_.size(), kMaxShared)) {
    in.fail("a key shares more bytes than the previous key has");
  }
  last_.resize(shared);
  last_ += in.string();
  key = last_;
}

void path(ByteWriter& out, std::string_view key, const Path& path) {
  if (path.empty()) return out.u8(kEmptyPath);
  const bool in_key = dotted(path) == key;
  out.u8(in_key ? kPathInKey : kPathSpelled);
  out.varint(path.size());
  for (const PathElement& element : path) {
    const auto* text = std::get_if<std::string>(&element);
    if (in_key) {
      const size_t size =
          text != nullptr ? text->size() : std::to_string(std::get<int64_t>(element)).size();
      out.varint(size * 2 + (text != nullptr ? 0 : 1));
    } else if (text != nullptr) {
      out.u8(0);
      out.string(*text);
    } else {
      out.u8(1);
      out.i64(std::get<int64_t>(element));
    }
  }
}

void path(ByteReader& in, std::string_view key, Path& path) {
  const uint8_t kind = in.u8();
  if (kind > kPathSpelled) in.fail("a path has an unknown encoding");
  path = kind == kEmptyPath   ? Path{}
         : kind == kPathInKey ? read_path_in_key(in, key)
                              : read_spelled_path(in);
}

void dtype(ByteWriter& out, DType dtype) { out.u8(static_cast<uint8_t>(dtype)); }

void dtype(ByteReader& in, DType& dtype) {
  dtype = static_cast<DType>(in.u8());
  const auto known = all_dtypes();
  if (std::find(known.begin(), known.end(), dtype) == known.end()) in.fail("a dtype is unknown");
}

void shape(ByteWriter& out, const Dims& shape) {
  out.varint(shape.size());
  for (int64_t n : shape) out.varint(static_cast<uint64_t>(n));
}

void shape(ByteReader& in, Dims& shape) {
  const uint64_t dims = in.count();
  if (dims > kMaxDims) in.fail("a tensor has more than 1024 dims");
  shape = Dims(dims, 0);
  bool empty = false;
  for (int64_t& n : shape) {
    n = static_cast<int64_t>(read_int63(in));
    empty = empty || n == 0;
  }
  int64_t elements = 1;
  for (int64_t n : shape) {
    if (empty) break;
    if (elements > std::numeric_limits<int64_t>::max() / n) in.fail("a shape overflows");
    elements *= n;
  }
}

void box(ByteWriter& out, const Dims&, const Box& box) {
  for (size_t d = 0; d < box.rank(); ++d) {
    out.varint(static_cast<uint64_t>(box.offset[d]));
    out.varint(static_cast<uint64_t>(box.shape[d]));
  }
}

void box(ByteReader& in, const Dims& shape, Box& box) {
  if (box.rank() != shape.size()) box = Box::whole(shape);
  for (size_t d = 0; d < shape.size(); ++d) {
    box.offset[d] = static_cast<int64_t>(read_int63(in));
    box.shape[d] = static_cast<int64_t>(read_int63(in));
    if (box.offset[d] > shape[d] || box.shape[d] > shape[d] - box.offset[d]) {
      in.fail("a box lies outside its tensor");
    }
  }
}

void index_below(ByteReader& in, uint32_t& index, size_t size, std::string_view what) {
  const uint64_t found = in.varint();
  if (found >= size) in.fail(std::string(what) + " is out of range");
  index = static_cast<uint32_t>(found);
}

}  // namespace tilestone::wire
