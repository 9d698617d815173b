#include "tilestone/base/dtype.h"

#include <algorithm>
#include <array>

namespace tilestone {
namespace {

struct DtypeRow {
  DType dtype;
  uint8_t itemsize;
  std::string_view name;
};

// Row i describes the dtype with number i.
constexpr std::array kTable = {
    DtypeRow{DType::kBool, 1, "bool"},
    DtypeRow{DType::kUInt8, 1, "uint8"},
    DtypeRow{DType::kInt8, 1, "int8"},
    DtypeRow{DType::kUInt16, 2, "uint16"},
    DtypeRow{DType::kInt16, 2, "int16"},
    DtypeRow{DType::kUInt32, 4, "uint32"},
    DtypeRow{DType::kInt32, 4, "int32"},
    DtypeRow{DType::kUInt64, 8, "uint64"},
    DtypeRow{DType::kInt64, 8, "int64"},
    DtypeRow{DType::kFloat16, 2, "float16"},
    DtypeRow{DType::kBFloat16, 2, "bfloat16"},
    DtypeRow{DType::kFloat32, 4, "float32"},
    DtypeRow{DType::kFloat64, 8, "float64"},
    DtypeRow{DType::kComplex32, 4, "complex32"},
    DtypeRow{DType::kComplex64, 8, "complex64"},
    DtypeRow{DType::kComplex128, 16, "complex128"},
    DtypeRow{DType::kFloat8E4M3FN, 1, "float8_e4m3fn"},
    DtypeRow{DType::kFloat8E5M2, 1, "float8_e5m2"},
    DtypeRow{DType::kFloat8E4M3FNUZ, 1, "float8_e4m3fnuz"},
    DtypeRow{DType::kFloat8E5M2FNUZ, 1, "float8_e5m2fnuz"},
    DtypeRow{DType::kFloat8E8M0FNU, 1, "float8_e8m0fnu"},
    DtypeRow{DType::kFloat4E2M1FNX2, 1, "float4_e2m1fn_x2"},
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

const DtypeRow& row(DType dtype) { return kTable.at(static_cast<size_t>(dtype)); }

}  // namespace

std::span<const DType> all_dtypes() { return kAll; }

uint64_t itemsize(DType dtype) { return row(dtype).itemsize; }

std::string_view to_string(DType dtype) { return row(dtype).name; }

std::optional<DType> parse_dtype(std::string_view name) {
  const auto* found = std::find_if(kTable.begin(), kTable.end(), [&](const DtypeRow& candidate) {
    return candidate.name == name;
  });
  if (found == kTable.end()) return std::nullopt;
  return found->dtype;
}

bool is_complex(DType dtype) {
  return dtype == DType::kComplex32 || dtype == DType::kComplex64 || dtype == DType::kComplex128;
}

bool is_convertible(DType from, DType to) {
  if (from == to) return true;
  if (from == DType::kFloat4E2M1FNX2 || to == DType::kFloat4E2M1FNX2) return false;
  return is_complex(to) || !is_complex(from);
}

}  // namespace tilestone
