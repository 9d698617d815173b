#include "tilestone/format/safetensors/dtype_names_internal.h"

namespace tilestone::safetensors {
namespace {

struct DTypeName {
  DType dtype;
  std::string_view name;
};
constexpr DTypeName kNames[] = {
    {DType::kBool, "BOOL"},
    {DType::kUInt8, "U8"},
    {DType::kInt8, "I8"},
    {DType::kUInt16, "U16"},
    {DType::kInt16, "I16"},
    {DType::kUInt32, "U32"},
    {DType::kInt32, "I32"},
    {DType::kUInt64, "U64"},
    {DType::kInt64, "I64"},
    {DType::kFloat16, "F16"},
    {DType::kBFloat16, "BF16"},
    {DType::kFloat32, "F32"},
    {DType::kFloat64, "F64"},
    {DType::kComplex64, "C64"},
    {DType::kFloat8E4M3FN, "F8_E4M3"},
    {DType::kFloat8E5M2, "F8_E5M2"},
    {DType::kFloat8E4M3FNUZ, "F8_E4M3FNUZ"},
    {DType::kFloat8E5M2FNUZ, "F8_E5M2FNUZ"},
    {DType::kFloat8E8M0FNU, "F8_E8M0"},
    {DType::kFloat4E2M1FNX2, "F4"},
};

}  // namespace

std::optional<std::string_view> name_of(DType dtype) {
  for (const DTypeName& known : kNames) {
    if (known.dtype == dtype) return known.name;
  }
  return std::nullopt;
}

std::optional<NamedDType> dtype_named(std::string_view name) {
  for (const DTypeName& known : kNames) {
    if (known.name == name) {
      return NamedDType{known.dtype, known.dtype == DType::kFloat4E2M1FNX2 ? 2 : 1};
    }
  }
  return std::nullopt;
}

}  // namespace tilestone::safetensors
