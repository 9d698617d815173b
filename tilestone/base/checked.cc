#include "tilestone/base/checked.h"

#include <fmt/format.h>

#include "tilestone/base/error.h"

namespace tilestone {
namespace {

template <typename T>
std::optional<T> add(T a, T b) {
  T result;
  if (__builtin_add_overflow(a, b, &result)) return std::nullopt;
  return result;
}

template <typename T>
std::optional<T> mul(T a, T b) {
  T result;
  if (__builtin_mul_overflow(a, b, &result)) return std::nullopt;
  return result;
}

template <typename T>
T value_or_throw(std::optional<T> result, T a, char op, T b, std::string_view what) {
  if (result) return *result;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{}: {} {} {} exceeds 64 bits", what, a, op, b));
}

}  // namespace

std::optional<int64_t> try_add(int64_t a, int64_t b) { return add(a, b); }
std::optional<int64_t> try_mul(int64_t a, int64_t b) { return mul(a, b); }
std::optional<uint64_t> try_add(uint64_t a, uint64_t b) { return add(a, b); }
std::optional<uint64_t> try_mul(uint64_t a, uint64_t b) { return mul(a, b); }

int64_t checked_add(int64_t a, int64_t b, std::string_view what) {
  return value_or_throw(add(a, b), a, '+', b, what);
}
int64_t checked_mul(int64_t a, int64_t b, std::string_view what) {
  return value_or_throw(mul(a, b), a, '*', b, what);
}
uint64_t checked_add(uint64_t a, uint64_t b, std::string_view what) {
  return value_or_throw(add(a, b), a, '+', b, what);
}
uint64_t checked_mul(uint64_t a, uint64_t b, std::string_view what) {
  return value_or_throw(mul(a, b), a, '*', b, what);
}

}  // namespace tilestone
