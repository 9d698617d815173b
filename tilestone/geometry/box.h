// Box: a half-open n-dimensional range of elements of a tensor. All planning works on boxes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace tilestone {

// A short list of int64: a shape, an offset, strides or a mesh coordinate. Up to four values are
// stored inside the object, because plans hold millions of boxes. Longer lists are on the heap.
// Behaves like a vector.

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

struct Box {
  // offset + shape fits an int64 in every dim. check_bounds() verifies this for a box from outside.
  Dims offset;  // first element, in elements, >= 0
  Dims shape;   // size in elements, >= 0; as many dims as offset (0 dims: a scalar's one element)

  static Box whole(const Dims& shape) { return {Dims(shape.size(), 0), shape}; }

  size_t rank() const { return shape.size(); }  // number of dims
  int64_t end(size_t dim) const { return offset[dim] + shape[dim]; }
  bool empty() const;  // contains no element
  int64_t numel() const { return tilestone::numel(shape); }
  bool contains(const Box& other) const;  // always if `other` is empty

  friend bool operator==(const Box&, const Box&) = default;
  friend bool operator<(const Box& a, const Box& b);  // by offset, then shape
};

std::string to_string(const Box& box);  // "[0:4, 8:16]"
uint64_t hash_of(const Box& box);

// The elements that both boxes contain, or nullopt if there are none. Both boxes must have the same
// number of dims.
std::optional<Box> intersect(const Box& a, const Box& b);
// Returns whether intersect() would return a box, without building it.
bool intersects(const Box& a, const Box& b);

// The same box in coordinates that begin at `origin`, which is not beyond the box's offset.
Box relative_to(const Box& box, const Dims& origin);

// Throws Error(kInvalidArgument), with a message that names the box, unless offset and shape have
// as many dims as global_shape, are not negative, and lie inside it. Overflow of offset + shape
// counts as outside.
void check_bounds(const Box& box, const Dims& global_shape);

// The parts of `a` that are not in `b`: at most 2 * dims disjoint boxes.
std::vector<Box> subtract(const Box& a, const Box& b);

// Converts a slice of a flattened tensor to boxes. A distributed optimizer's shards are such
// slices.

struct FlatRange {
  int64_t begin = 0;  // elements, half-open
  int64_t end = 0;
  friend bool operator==(const FlatRange&, const FlatRange&) = default;
};

// The elements [begin, end) of a flattened C-contiguous tensor of `shape`, as disjoint boxes in
// flat order. Returns at most 2n - 1 boxes for n dims, and none for an empty range. Concatenating
// the boxes' elements gives the range's elements in order. Throws Error(kInvalidArgument) unless 0
// <= begin <= end <= numel(shape).
std::vector<Box> flat_range_to_boxes(const Dims& shape, FlatRange range);

}  // namespace tilestone
