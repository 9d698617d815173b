#include "tilestone/geometry/box.h"

#include <bit>
#include <limits>

#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"

namespace tilestone {

int64_t* Dims::clone(const int64_t* values, size_t count) {
  auto* copy = new int64_t[std::bit_ceil(count)];
  std::copy_n(values, count, copy);
  return copy;
}

Dims::Dims(const int64_t* values, size_t count) : size_(count) {
  if (count > kInline) {
    heap_ = clone(values, count);
  } else {
    std::copy_n(values, count, inline_);
  }
}

void Dims::push_back(int64_t value) {
  if (size_ < kInline) {
    inline_[size_++] = value;
    return;
  }
  if (std::has_single_bit(size_)) {  // full: inline, or a heap block of exactly this size
    auto* larger = new int64_t[size_ * 2];
    std::copy_n(data(), size_, larger);
    if (size_ > kInline) delete[] heap_;
    heap_ = larger;
  }
  heap_[size_++] = value;
}

void Dims::resize(size_t count, int64_t value) {
  if (count > kInline) {
    auto* block = new int64_t[std::bit_ceil(count)];
    const size_t kept = std::min(count, size_);
    std::copy_n(data(), kept, block);
    std::fill(block + kept, block + count, value);
    if (size_ > kInline) delete[] heap_;
    heap_ = block;
  } else if (size_ > kInline) {
    int64_t* block = heap_;
    std::copy_n(block, count, inline_);
    delete[] block;
  } else if (count > size_) {
    std::fill(inline_ + size_, inline_ + count, value);
  }
  size_ = count;
}

bool operator<(const Dims& a, const Dims& b) {
  return std::lexicographical_compare(a.begin(), a.end(), b.begin(), b.end());
}

std::string to_string(const Dims& dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(dims[i]);
  }
  return text + "]";
}

uint64_t hash_of(const Dims& dims) {
  uint64_t hash = 0x9e3779b97f4a7c15u ^ dims.size();
  for (int64_t value : dims) {
    hash ^= static_cast<uint64_t>(value);
    hash *= 0xff51afd7ed558ccdu;  // the mixing step of MurmurHash3's finaliser
    hash ^= hash >> 32;
  }
  return hash;
}

int64_t numel(const Dims& shape) {
  bool empty = false;
  for (int64_t n : shape) {
    if (n < 0) {
      throw Error(ErrorCode::kInvalidArgument, "shape " + to_string(shape) + " has a negative dim");
    }
    empty = empty || n == 0;
  }
  if (empty) return 0;
  int64_t product = 1;
  for (int64_t n : shape) {
    const auto next = try_mul(product, n);
    if (!next) {
      throw Error(ErrorCode::kInvalidArgument,
                  "shape " + to_string(shape) + " has more than 2^63 - 1 elements");
    }
    product = *next;
  }
  return product;
}

Dims contiguous_strides(const Dims& shape) {
  Dims strides(shape.size(), 1);
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    if (i > 0) stride = checked_mul(stride, std::max<int64_t>(shape[i], 1), "strides");
  }
  return strides;
}

}  // namespace tilestone
