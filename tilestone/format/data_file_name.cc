#include "tilestone/format/data_file_name.h"

#include <charconv>

namespace tilestone {
namespace {

constexpr std::string_view kMiddle = "__";
constexpr std::string_view kSuffix = ".distcp";

// Parses a decimal number without leading zeros that fits an int.
std::optional<int> number_in(std::string_view digits) {
  int number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (error != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
  return number >= 0 && std::to_string(number) == digits ? std::optional(number) : std::nullopt;
}

}  // namespace

std::string data_file_name(std::string_view save_id, int rank, int index) {
  std::string name(save_id);
  name.append(kMiddle).append(std::to_string(rank)).append("_").append(std::to_string(index));
  return name.append(kSuffix);
}

std::optional<DataFileName> parse_data_file_name(std::string_view name) {
  if (!name.ends_with(kSuffix)) return std::nullopt;
  name.remove_suffix(kSuffix.size());
  const size_t middle = name.rfind(kMiddle);
  if (middle == std::string_view::npos) return std::nullopt;
  const std::string_view numbers = name.substr(middle + kMiddle.size());
  const size_t between = numbers.find('_');
  if (between == std::string_view::npos) return std::nullopt;
  const auto rank = number_in(numbers.substr(0, between));
  const auto index = number_in(numbers.substr(between + 1));
  if (!rank || !index) return std::nullopt;
  return DataFileName{std::string(name.substr(0, middle)), *rank, *index};
}

}  // namespace tilestone
