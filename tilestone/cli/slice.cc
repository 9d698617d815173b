#include "tilestone/cli/slice.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <vector>

#include "tilestone/base/number_text.h"

namespace tilestone::cli {
namespace {

[[noreturn]] void fail(const std::string& text, std::string_view problem) {
  throw Error(ErrorCode::kInvalidArgument, fmt::format("slice \"{}\": {}", text, problem))
      .with_hint("give one part per dim, such as 0:4,:,7");
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (size_t begin = 0;;) {
    const size_t end = text.find(separator, begin);
    parts.push_back(text.substr(begin, end - begin));
    if (end == std::string_view::npos) return parts;
    begin = end + 1;
  }
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

std::optional<int64_t> number(const std::string& whole, std::string_view text) {
  text = trimmed(text);
  if (text.empty()) return std::nullopt;
  const auto value = number_in<int64_t>(text);
  if (!value) fail(whole, fmt::format("\"{}\" is not an integer", text));
  return value;
}

// A negative value counts from the end. The result is clamped to 0 ... size.
int64_t clamp_index(int64_t value, int64_t size) {
  return std::clamp<int64_t>(value < 0 ? value + size : value, 0, size);
}

}  // namespace

Box parse_slice(const std::string& text, const Dims& shape) {
  Box box = Box::whole(shape);
  if (trimmed(text).empty()) return box;
  const std::vector<std::string_view> parts = split(text, ',');
  if (parts.size() > shape.size()) {
    fail(text,
         fmt::format("it has {} parts, but the tensor has {} dims", parts.size(), shape.size()));
  }
  for (size_t d = 0; d < parts.size(); ++d) {
    const std::vector<std::string_view> ends = split(parts[d], ':');
    if (ends.size() > 2) fail(text, "steps are not supported");
    const std::optional<int64_t> first = number(text, ends[0]);
    if (ends.size() == 1) {
      if (!first) fail(text, fmt::format("the part for dim {} is empty", d));
      const int64_t index = *first < 0 ? *first + shape[d] : *first;
      if (index < 0 || index >= shape[d]) {
        fail(text, fmt::format("index {} is outside dim {} of size {}", *first, d, shape[d]));
      }
      box.offset[d] = index;
      box.shape[d] = 1;
      continue;
    }
    const int64_t begin = clamp_index(first.value_or(0), shape[d]);
    const int64_t end = clamp_index(number(text, ends[1]).value_or(shape[d]), shape[d]);
    box.offset[d] = begin;
    box.shape[d] = std::max<int64_t>(0, end - begin);
  }
  return box;
}

}  // namespace tilestone::cli
