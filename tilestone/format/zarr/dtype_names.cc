#include <array>
#include <string>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/format/zarr/dtype_names_internal.h"

namespace tilestone::zarr {
namespace {

constexpr std::array<std::pair<DType, std::string_view>, 15> kNames{{
    {DType::kBool, "|b1"},
    {DType::kUInt8, "|u1"},
    {DType::kInt8, "|i1"},
    {DType::kUInt16, "<u2"},
    {DType::kInt16, "<i2"},
    {DType::kUInt32, "<u4"},
    {DType::kInt32, "<i4"},
    {DType::kUInt64, "<u8"},
    {DType::kInt64, "<i8"},
    {DType::kFloat16, "<f2"},
    {DType::kBFloat16, "bfloat16"},
    {DType::kFloat32, "<f4"},
    {DType::kFloat64, "<f8"},
    {DType::kComplex64, "<c8"},
    {DType::kComplex128, "<c16"},
}};

// Dtypes that tensorstore has names for and numpy doesn't. Tilestone does not support tensorstore's
// 4-bit and e3m4 floats.
constexpr std::array<DType, 4> kReadOnly{DType::kFloat8E4M3FN, DType::kFloat8E5M2,
                                         DType::kFloat8E4M3FNUZ, DType::kFloat8E5M2FNUZ};

[[noreturn]] void unsupported(std::string_view name, std::string_view why) {
  throw Error(ErrorCode::kUnsupported,
              "dtype \"" + std::string(name.substr(0, 40)) + "\" " + std::string(why));
}

}  // namespace

std::optional<std::string_view> name_of(DType dtype) {
  for (const auto& [known, name] : kNames) {
    if (known == dtype) return name;
  }
  return std::nullopt;
}

DType dtype_named(std::string_view name) {
  for (const auto& [known, known_name] : kNames) {
    if (known_name == name) return known;
    // A single byte has no byte order: numpy reads "<u1" and ">u1" as "|u1".
    const bool any_order =
        known_name[0] == '|' && !name.empty() && (name[0] == '<' || name[0] == '>');
    if (any_order && known_name.substr(1) == name.substr(1)) return known;
  }
  for (const DType known : kReadOnly) {
    if (to_string(known) == name) return known;
  }
  if (name.starts_with('>')) unsupported(name, "is big-endian");
  unsupported(name, "is not supported");
}

}  // namespace tilestone::zarr
