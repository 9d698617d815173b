// A short list of int64: a shape, an offset, strides or a mesh coordinate. Up to four values are
// stored inside the object, because plans hold millions of boxes. Longer lists are on the heap.
// Behaves like a vector.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

namespace tilestone {

class Dims {
 public:
  static constexpr size_t kInline = 4;

  Dims() = default;
  Dims(std::initializer_list<int64_t> values) : Dims(values.begin(), values.size()) {}
  explicit Dims(std::span<const int64_t> values) : Dims(values.data(), values.size()) {}
  // `count` copies of `value`: Dims(2, 3) is [3, 3], but Dims{2, 3} is [2, 3].
  Dims(size_t count, int64_t value) {
    if (count <= kInline && value == 0) {
      size_ = count;
    } else {
      resize(count, value);
    }
  }
  Dims(const Dims& other) : size_(other.size_) {
    if (other.size_ > kInline) {
      heap_ = clone(other.heap_, other.size_);
    } else {
      std::copy_n(other.inline_, kInline, inline_);
    }
  }
  Dims(Dims&& other) noexcept : size_(other.size_) { steal(other); }
  Dims& operator=(const Dims& other) {
    if (this == &other) return *this;
    if (size_ > kInline || other.size_ > kInline) return *this = Dims(other);
    std::copy_n(other.inline_, kInline, inline_);
    size_ = other.size_;
    return *this;
  }
  Dims& operator=(Dims&& other) noexcept {
    if (this == &other) return *this;
    if (size_ > kInline) delete[] heap_;
    size_ = other.size_;
    steal(other);
    return *this;
  }
  ~Dims() {
    if (size_ > kInline) delete[] heap_;
  }

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  int64_t* data() { return size_ > kInline ? heap_ : inline_; }
  const int64_t* data() const { return size_ > kInline ? heap_ : inline_; }
  int64_t& operator[](size_t i) { return data()[i]; }
  int64_t operator[](size_t i) const { return data()[i]; }
  int64_t* begin() { return data(); }
  int64_t* end() { return data() + size_; }
  const int64_t* begin() const { return data(); }
  const int64_t* end() const { return data() + size_; }
  int64_t back() const { return data()[size_ - 1]; }
  void push_back(int64_t value);
  void resize(size_t count, int64_t value = 0);
  std::span<const int64_t> span() const { return {data(), size_}; }

  friend bool operator==(const Dims& a, const Dims& b) {
    return a.size_ == b.size_ && std::equal(a.begin(), a.end(), b.begin());
  }
  friend bool operator<(const Dims& a, const Dims& b);  // lexicographic; a prefix comes first

 private:
  Dims(const int64_t* values, size_t count);
  // A heap copy with capacity for the next power of two, so that push_back needs no capacity field.
  static int64_t* clone(const int64_t* values, size_t count);
  void steal(Dims& other) noexcept {
    if (other.size_ > kInline) {
      heap_ = other.heap_;
      other.size_ = 0;
    } else {
      std::copy_n(other.inline_, kInline, inline_);
    }
  }

  union {
    int64_t inline_[kInline] = {0, 0, 0, 0};
    int64_t* heap_;
  };
  size_t size_ = 0;
};

std::string to_string(const Dims& dims);  // "[8, 12]", "[]"
uint64_t hash_of(const Dims& dims);

// The product of the dims; 1 if there are none. Throws Error(kInvalidArgument) on a negative dim
// and on int64 overflow.
int64_t numel(const Dims& shape);
// The strides, in elements, of a C-contiguous tensor of this shape. Overflow is checked.
Dims contiguous_strides(const Dims& shape);

}  // namespace tilestone
