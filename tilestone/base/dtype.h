// Element types: those that PyTorch 2.14 can save in a checkpoint.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace tilestone {

// The numbers travel between ranks; append only.
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
  kFloat4E2M1FNX2,  // two 4-bit floats in a byte; shapes count bytes, as in torch
};

std::span<const DType> all_dtypes();
uint64_t itemsize(DType dtype);           // bytes an element
std::string_view to_string(DType dtype);  // torch's name: "bfloat16", "float8_e4m3fn"
std::optional<DType> parse_dtype(std::string_view name);  // inverse of to_string; nullopt: unknown

}  // namespace tilestone
