// Arithmetic with overflow checks, for numbers that come from a file or a user.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace tilestone {

// nullopt on overflow. T: int64_t or uint64_t.
template <typename T>
std::optional<T> try_add(T a, T b) {
  T result;
  return __builtin_add_overflow(a, b, &result) ? std::nullopt : std::optional<T>(result);
}
template <typename T>
std::optional<T> try_mul(T a, T b) {
  T result;
  return __builtin_mul_overflow(a, b, &result) ? std::nullopt : std::optional<T>(result);
}

// These throw Error(kInvalidArgument) on overflow. `what` names the quantity ("bytes of the box").
int64_t checked_add(int64_t a, int64_t b, std::string_view what);
int64_t checked_mul(int64_t a, int64_t b, std::string_view what);
uint64_t checked_add(uint64_t a, uint64_t b, std::string_view what);
uint64_t checked_mul(uint64_t a, uint64_t b, std::string_view what);

// Rounds value up or down to a multiple of alignment, which must be a power of two. Does not check
// overflow.
constexpr uint64_t align_up(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) & ~(alignment - 1);
}
constexpr uint64_t align_down(uint64_t value, uint64_t alignment) {
  return value & ~(alignment - 1);
}

}  // namespace tilestone
