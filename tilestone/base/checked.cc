#include "tilestone/base/checked.h"

#include <fmt/format.h>

#include "tilestone/base/error.h"

namespace tilestone {
namespace {

template <typename T>
T value_or_throw(std::optional<T> result, T a, char op, T b, std::string_view what) {
  if (result) return *result;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{}: {} {} {} exceeds 64 bits", what, a, op, b));
}

}  // namespace

int64_t checked_add(int64_t a, int64_t b, std::string_view what) {
  return value_or_throw(try_add(a, b), a, '+', b, what);
}
int64_t checked_mul(int64_t a, int64_t b, std::string_view what) {
  return value_or_throw(try_mul(a, b), a, '*', b, what);
}
uint64_t checked_add(uint64_t a, uint64_t b, std::string_view what) {
  return value_or_throw(try_add(a, b), a, '+', b, what);
}
uint64_t checked_mul(uint64_t a, uint64_t b, std::string_view what) {
  return value_or_throw(try_mul(a, b), a, '*', b, what);
}

}  // namespace tilestone
