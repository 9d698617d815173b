// Arithmetic on numbers that come from a file or a user: the result, or an Error.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace tilestone {

// nullopt on overflow.
std::optional<int64_t> try_add(int64_t a, int64_t b);
std::optional<int64_t> try_mul(int64_t a, int64_t b);
std::optional<uint64_t> try_add(uint64_t a, uint64_t b);
std::optional<uint64_t> try_mul(uint64_t a, uint64_t b);

// Throw Error(kInvalidArgument) on overflow; `what` names the quantity ("bytes of the box").
int64_t checked_add(int64_t a, int64_t b, std::string_view what);
int64_t checked_mul(int64_t a, int64_t b, std::string_view what);
uint64_t checked_add(uint64_t a, uint64_t b, std::string_view what);
uint64_t checked_mul(uint64_t a, uint64_t b, std::string_view what);

// value rounded up to a multiple of alignment (a power of two).
constexpr uint64_t align_up(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) & ~(alignment - 1);
}

}  // namespace tilestone
