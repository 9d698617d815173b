#include "tilestone/base/size_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

namespace tilestone {

std::string human_bytes(uint64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) return fmt::format("{} B", bytes);
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  return fmt::format("{:.{}f} {}", value, value < 10 ? 2 : 1, kUnits[unit]);
}

std::string grouped(uint64_t number) {
  std::string digits = std::to_string(number);
  for (auto i = static_cast<int64_t>(digits.size()) - 3; i > 0; i -= 3) {
    digits.insert(static_cast<size_t>(i), ",");
  }
  return digits;
}

std::string counted(uint64_t number, std::string_view noun) {
  return fmt::format("{} {}{}", grouped(number), noun, number == 1 ? "" : "s");
}

std::string human_seconds(double seconds) {
  return fmt::format("{:.{}f} s", seconds, seconds < 1 ? 3 : seconds < 60 ? 2 : 0);
}

std::string ranks_text(const std::vector<int>& ranks, size_t most) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  const size_t named = std::min(ranks.size(), most);
  for (size_t i = 0; i < named; ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  const size_t rest = ranks.size() - named;
  return rest == 0 ? text : text + " and " + std::to_string(rest) + " more";
}

}  // namespace tilestone
