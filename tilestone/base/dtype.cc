#include "tilestone/base/dtype.h"

#include <algorithm>
#include <array>

namespace tilestone {
namespace {

struct Row {
  DType dtype;
  uint8_t itemsize;
  std::string_view name;
};

// In the order of the enum's numbers.
constexpr std::array kTable = {
    Row{DType::kBool, 1, "bool"},
    Row{DType::kUInt8, 1, "uint8"},
    Row{DType::kInt8, 1, "int8"},
    Row{DType::kUInt16, 2, "uint16"},
    Row{DType::kInt16, 2, "int16"},
    Row{DType::kUInt32, 4, "uint32"},
    Row{DType::kInt32, 4, "int32"},
    Row{DType::kUInt64, 8, "uint64"},
    Row{DType::kInt64, 8, "int64"},
    Row{DType::kFloat16, 2, "float16"},
    Row{DType::kBFloat16, 2, "bfloat16"},
    Row{DType::kFloat32, 4, "float32"},
    Row{DType::kFloat64, 8, "float64"},
    Row{DType::kComplex32, 4, "complex32"},
    Row{DType::kComplex64, 8, "complex64"},
    Row{DType::kComplex128, 16, "complex128"},
    Row{DType::kFloat8E4M3FN, 1, "float8_e4m3fn"},
    Row{DType::kFloat8E5M2, 1, "float8_e5m2"},
    Row{DType::kFloat8E4M3FNUZ, 1, "float8_e4m3fnuz"},
    Row{DType::kFloat8E5M2FNUZ, 1, "float8_e5m2fnuz"},
    Row{DType::kFloat8E8M0FNU, 1, "float8_e8m0fnu"},
    Row{DType::kFloat4E2M1FNX2, 1, "float4_e2m1fn_x2"},
};

constexpr auto kAll = [] {
  std::array<DType, kTable.size()> all{};
  for (size_t i = 0; i < kTable.size(); ++i) all[i] = kTable[i].dtype;
  return all;
}();

constexpr bool table_is_in_order() {
  for (size_t i = 0; i < kTable.size(); ++i) {
    if (static_cast<size_t>(kTable[i].dtype) != i) return false;
  }
  return true;
}
static_assert(table_is_in_order());

const Row& row(DType dtype) { return kTable.at(static_cast<size_t>(dtype)); }

}  // namespace

std::span<const DType> all_dtypes() { return kAll; }

uint64_t itemsize(DType dtype) { return row(dtype).itemsize; }

std::string_view to_string(DType dtype) { return row(dtype).name; }

std::optional<DType> parse_dtype(std::string_view name) {
  const auto* found = std::find_if(kTable.begin(), kTable.end(),
                                   [&](const Row& candidate) { return candidate.name == name; });
  if (found == kTable.end()) return std::nullopt;
  return found->dtype;
}

}  // namespace tilestone
