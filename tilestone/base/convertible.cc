#include "tilestone/base/convertible.h"

namespace tilestone {
namespace {

bool is_complex(DType dtype) {
  return dtype == DType::kComplex32 || dtype == DType::kComplex64 || dtype == DType::kComplex128;
}

}  // namespace

bool is_convertible(DType from, DType to) {
  if (from == to) return true;
  if (from == DType::kFloat4E2M1FNX2 || to == DType::kFloat4E2M1FNX2) return false;
  return is_complex(to) || !is_complex(from);
}

}  // namespace tilestone
