// The element types that PyTorch 2.14 can save in a checkpoint.
#pragma once

#include <complex>
#include <concepts>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace tilestone {

// The numbers travel between ranks, so only append.
enum class DType : uint8_t {
  kBool = 0,
  kUInt8,
  kInt8,
  kUInt16,
  kInt16,
  kUInt32,
  kInt32,
  kUInt64,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kComplex32,  // two float16
  kComplex64,
  kComplex128,
  kFloat8E4M3FN,
  kFloat8E5M2,
  kFloat8E4M3FNUZ,
  kFloat8E5M2FNUZ,
  kFloat8E8M0FNU,
  kFloat4E2M1FNX2,  // two 4-bit floats per byte; shapes count bytes, as in torch
};

std::span<const DType> all_dtypes();
uint64_t itemsize(DType dtype);           // bytes per element
std::string_view to_string(DType dtype);  // torch's name: "bfloat16", "float8_e4m3fn"
std::optional<DType> parse_dtype(std::string_view name);  // inverse of to_string; nullopt: unknown
bool is_complex(DType dtype);
// Whether a load with `cast` converts elements. Every dtype converts to itself. Complex numbers do
// not convert to real ones, which would lose the imaginary part. kFloat4E2M1FNX2 converts to and
// from no other dtype. All other pairs convert.
bool is_convertible(DType from, DType to);

// The dtype whose elements have the C++ type T: bool, integers of 8 to 64 bits, float, double,
// std::complex<float> and std::complex<double>. nullopt for all other types, such as char and
// std::byte.
template <typename T>
constexpr std::optional<DType> dtype_of() {
  if constexpr (std::same_as<T, bool>) return DType::kBool;
  if constexpr (std::same_as<T, float>) return DType::kFloat32;
  if constexpr (std::same_as<T, double>) return DType::kFloat64;
  if constexpr (std::same_as<T, std::complex<float>>) return DType::kComplex64;
  if constexpr (std::same_as<T, std::complex<double>>) return DType::kComplex128;
  if constexpr (std::same_as<T, int8_t>) return DType::kInt8;
  if constexpr (std::same_as<T, uint8_t>) return DType::kUInt8;
  if constexpr (std::same_as<T, int16_t>) return DType::kInt16;
  if constexpr (std::same_as<T, uint16_t>) return DType::kUInt16;
  if constexpr (std::same_as<T, int32_t>) return DType::kInt32;
  if constexpr (std::same_as<T, uint32_t>) return DType::kUInt32;
  if constexpr (std::same_as<T, int64_t> || std::same_as<T, long long>) return DType::kInt64;
  if constexpr (std::same_as<T, uint64_t> || std::same_as<T, unsigned long long>) {
    return DType::kUInt64;
  }
  return std::nullopt;
}

template <typename T>
concept TensorElement = dtype_of<T>().has_value();

}  // namespace tilestone
