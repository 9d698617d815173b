#include "tilestone/format/data_file_name.h"

#include "tilestone/base/number_text.h"

namespace tilestone {
namespace {

constexpr std::string_view kMiddle = "__";
constexpr std::string_view kSuffix = ".distcp";

// Parses a decimal number without leading zeros that fits an int.
std::optional<int> plain_number(std::string_view digits) {
  const auto number = number_in<int>(digits);
  return number && *number >= 0 && std::to_string(*number) == digits ? number : std::nullopt;
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
  const auto rank = plain_number(numbers.substr(0, between));
  const auto index = plain_number(numbers.substr(between + 1));
  if (!rank || !index) return std::nullopt;
  return DataFileName{std::string(name.substr(0, middle)), *rank, *index};
}

}  // namespace tilestone
