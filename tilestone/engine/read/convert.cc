// Elements are converted through one of two wide types, one line of the innermost dim at a time:
// integers through 64 bits, everything else through double. A double holds every source value
// exactly, except integers of more than 53 bits. Those are first rounded to odd, so that only the
// final rounding counts.
#include "tilestone/engine/read/convert_internal.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "tilestone/base/dtype.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/read/mini_float_internal.h"

namespace tilestone::engine {
namespace {

constexpr size_t kLine = 512;  // elements converted at a time

enum class Class { kInteger, kReal, kComplex };

Class class_of(DType dtype) {
  switch (dtype) {
    case DType::kBool:
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kUInt16:
    case DType::kInt16:
    case DType::kUInt32:
    case DType::kInt32:
    case DType::kUInt64:
    case DType::kInt64:
      return Class::kInteger;
    case DType::kComplex32:
    case DType::kComplex64:
    case DType::kComplex128:
      return Class::kComplex;
    default:
      return Class::kReal;
  }
}

// The dtype of a complex number's two parts.
DType part_of(DType dtype) {
  if (dtype == DType::kComplex32) return DType::kFloat16;
  if (dtype == DType::kComplex64) return DType::kFloat32;
  return DType::kFloat64;
}

// A run of elements `step` bytes apart.
struct Line {
  std::byte* data;
  int64_t step;
  size_t count;
};

template <typename Stored, typename Wide, typename Decode>
void load(const Line& line, Wide* out, const Decode& decode_one) {
  for (size_t i = 0; i < line.count; ++i) {
    Stored value;
    std::memcpy(&value, line.data + static_cast<int64_t>(i) * line.step, sizeof value);
    out[i] = decode_one(value);
  }
}

template <typename Stored, typename Wide, typename Encode>
void store(const Line& line, const Wide* in, const Encode& encode_one) {
  for (size_t i = 0; i < line.count; ++i) {
    const Stored value = encode_one(in[i]);
    std::memcpy(line.data + static_cast<int64_t>(i) * line.step, &value, sizeof value);
  }
}

template <typename Stored>
void load_as_int(const Line& line, int64_t* out) {
  load<Stored>(line, out, [](Stored v) { return static_cast<int64_t>(v); });
}

void load_integers(DType dtype, const Line& line, int64_t* out) {
  switch (dtype) {
    case DType::kBool:
      return load<uint8_t>(line, out, [](uint8_t v) { return int64_t{v != 0}; });
    case DType::kUInt8:
      return load_as_int<uint8_t>(line, out);
    case DType::kInt8:
      return load_as_int<int8_t>(line, out);
    case DType::kUInt16:
      return load_as_int<uint16_t>(line, out);
    case DType::kInt16:
      return load_as_int<int16_t>(line, out);
    case DType::kUInt32:
      return load_as_int<uint32_t>(line, out);
    case DType::kInt32:
      return load_as_int<int32_t>(line, out);
    default:  // 64 bits, signed or not
      return load_as_int<int64_t>(line, out);
  }
}

template <typename Stored>
void store_as_int(const Line& line, const int64_t* in) {
  store<Stored>(line, in, [](int64_t v) { return static_cast<Stored>(v); });
}

void store_integers(DType dtype, const Line& line, const int64_t* in) {
  switch (dtype) {
    case DType::kBool:
      return store<uint8_t>(line, in, [](int64_t v) { return uint8_t{v != 0}; });
    case DType::kUInt8:
    case DType::kInt8:
      return store_as_int<uint8_t>(line, in);
    case DType::kUInt16:
    case DType::kInt16:
      return store_as_int<uint16_t>(line, in);
    case DType::kUInt32:
    case DType::kInt32:
      return store_as_int<uint32_t>(line, in);
    default:
      return store_as_int<int64_t>(line, in);
  }
}

const MiniFloat& mini_float(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return kHalf;
    case DType::kBFloat16:
      return kBrain;
    case DType::kFloat8E4M3FN:
      return kE4M3FN;
    case DType::kFloat8E5M2:
      return kE5M2;
    case DType::kFloat8E4M3FNUZ:
      return kE4M3FNUZ;
    case DType::kFloat8E5M2FNUZ:
      return kE5M2FNUZ;
    default:
      throw Error(ErrorCode::kInternal,
                  "no small floating-point type: " + std::string(to_string(dtype)));
  }
}

void load_reals(DType dtype, const Line& line, double* out) {
  if (dtype == DType::kFloat64) return load<double>(line, out, [](double v) { return v; });
  if (dtype == DType::kFloat32) return load<float>(line, out, [](float v) { return double{v}; });
  if (dtype == DType::kFloat8E8M0FNU) {
    return load<uint8_t>(line, out, [](uint8_t v) { return decode_e8m0(v); });
  }
  const MiniFloat& type = mini_float(dtype);
  if (itemsize(dtype) == 2) {
    return load<uint16_t>(line, out, [&](uint16_t v) { return decode(type, v); });
  }
  load<uint8_t>(line, out, [&](uint8_t v) { return decode(type, v); });
}

void store_reals(DType dtype, const Line& line, const double* in) {
  if (dtype == DType::kFloat64) return store<double>(line, in, [](double v) { return v; });
  if (dtype == DType::kFloat32) {
    return store<float>(line, in, [](double v) { return static_cast<float>(v); });
  }
  if (dtype == DType::kFloat8E8M0FNU) {
    return store<uint8_t>(line, in, [](double v) { return encode_e8m0(v); });
  }
  const MiniFloat& type = mini_float(dtype);
  if (itemsize(dtype) == 2) {
    return store<uint16_t>(line, in,
                           [&](double v) { return static_cast<uint16_t>(encode(type, v)); });
  }
  store<uint8_t>(line, in, [&](double v) { return static_cast<uint8_t>(encode(type, v)); });
}

// Rounds to odd if 53 bits are not enough: the sticky bit keeps a later rounding from seeing a tie.
double rounded_to_odd(uint64_t magnitude) {
  const int lost = std::max(0, 64 - std::countl_zero(magnitude) - 53);
  const uint64_t kept = magnitude >> lost;
  const bool inexact = (kept << lost) != magnitude;
  return std::ldexp(static_cast<double>(kept | uint64_t{inexact}), lost);
}

// The double from which an integer is converted to `to`.
double to_double(int64_t value, bool is_unsigned, DType to) {
  if (to == DType::kFloat64) {  // this is the final rounding; the processor does it
    return is_unsigned ? static_cast<double>(static_cast<uint64_t>(value))
                       : static_cast<double>(value);
  }
  if (is_unsigned || value >= 0) return rounded_to_odd(static_cast<uint64_t>(value));
  return -rounded_to_odd(uint64_t{0} - static_cast<uint64_t>(value));
}

// Truncates and saturates to the target's range. NaN is true, and 0 as an integer. Returns the bits
// of the result.
int64_t to_integer(double value, DType dtype) {
  if (dtype == DType::kBool) return value != 0;
  if (std::isnan(value)) return 0;
  const int bits = static_cast<int>(itemsize(dtype)) * 8;
  const bool is_unsigned = dtype == DType::kUInt8 || dtype == DType::kUInt16 ||
                           dtype == DType::kUInt32 || dtype == DType::kUInt64;
  const double beyond = std::ldexp(1.0, is_unsigned ? bits : bits - 1);
  const uint64_t largest = ~uint64_t{0} >> (64 - (is_unsigned ? bits : bits - 1));
  if (value >= beyond) return static_cast<int64_t>(largest);
  if (is_unsigned) return value <= 0 ? 0 : static_cast<int64_t>(static_cast<uint64_t>(value));
  if (value < -beyond) return -static_cast<int64_t>(largest) - 1;
  return static_cast<int64_t>(value);
}

// Converts one line of at most kLine elements through the wide types.
void convert_line(const Line& target, DType to, const Line& source, DType from) {
  int64_t integers[kLine];
  double reals[kLine];
  const Class source_class = class_of(from);
  const Class target_class = class_of(to);
  if (source_class == Class::kInteger) {
    load_integers(from, source, integers);
    if (target_class == Class::kInteger) return store_integers(to, target, integers);
    const bool is_unsigned = from == DType::kUInt64;
    for (size_t i = 0; i < source.count; ++i) reals[i] = to_double(integers[i], is_unsigned, to);
  } else {
    load_reals(from, source, reals);
    if (target_class == Class::kInteger) {
      for (size_t i = 0; i < source.count; ++i) integers[i] = to_integer(reals[i], to);
      return store_integers(to, target, integers);
    }
  }
  store_reals(to, target, reals);
}

void convert_any_line(const Line& target, DType to, const Line& source, DType from) {
  if (class_of(to) != Class::kComplex) return convert_line(target, to, source, from);
  const DType part = part_of(to);
  const auto target_half = static_cast<int64_t>(itemsize(part));
  const Line imaginary{target.data + target_half, target.step, target.count};
  if (class_of(from) == Class::kComplex) {
    const DType source_part = part_of(from);
    const auto half = static_cast<int64_t>(itemsize(source_part));
    convert_line(target, part, source, source_part);
    convert_line(imaginary, part, {source.data + half, source.step, source.count}, source_part);
  } else {
    convert_line(target, part, source, from);
    const double zeros[kLine] = {};
    store_reals(part, imaginary, zeros);
  }
}

}  // namespace

void convert(const StridedView& target, DType to, const StridedView& source, DType from) {
  if (!is_convertible(from, to)) {
    throw Error(ErrorCode::kInternal, "no conversion from " + std::string(to_string(from)) +
                                          " to " + std::string(to_string(to)));
  }
  if (target.shape != source.shape) {
    throw Error(ErrorCode::kInternal, "conversion between shapes " + to_string(source.shape) +
                                          " and " + to_string(target.shape));
  }
  if (numel(source.shape) == 0) return;
  const size_t dims = source.shape.size();
  const int64_t length = dims == 0 ? 1 : source.shape[dims - 1];
  const int64_t source_stride = dims == 0 ? 0 : source.strides[dims - 1];
  const int64_t target_stride = dims == 0 ? 0 : target.strides[dims - 1];
  const auto source_size = static_cast<int64_t>(source.itemsize);
  const auto target_size = static_cast<int64_t>(target.itemsize);
  Dims index(dims, 0);
  while (true) {
    int64_t source_at = 0, target_at = 0;
    for (size_t d = 0; d + 1 < dims; ++d) {
      source_at += index[d] * source.strides[d];
      target_at += index[d] * target.strides[d];
    }
    for (int64_t i = 0; i < length; i += kLine) {
      const auto count = static_cast<size_t>(std::min<int64_t>(kLine, length - i));
      convert_any_line({target.data + (target_at + i * target_stride) * target_size,
                        target_stride * target_size, count},
                       to,
                       {source.data + (source_at + i * source_stride) * source_size,
                        source_stride * source_size, count},
                       from);
    }
    size_t d = dims > 0 ? dims - 1 : 0;
    while (d > 0 && ++index[d - 1] == source.shape[d - 1]) index[--d] = 0;
    if (d == 0) return;
  }
}

}  // namespace tilestone::engine
