#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/number_text.h"
#include "tilestone/engine/training_run/checkpoint_manager.h"

namespace tilestone {
namespace {

constexpr std::string_view kPlace = "{step";
constexpr size_t kMostDigits = 20;  // of a 64-bit number

// How other programs name steps: Megatron-LM and torchtitan.
constexpr const char* kOtherPatterns[] = {kStepPattern, "iter_{step:07}", "step-{step}"};

[[noreturn]] void refuse_pattern(const std::string& pattern, const std::string& why) {
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("the pattern \"{}\" for the names of steps {}", pattern, why))
      .with_hint(fmt::format("a pattern is like \"{}\" or \"step-{{step}}\"", kStepPattern));
}

// "" -> 0, ":08" -> 8; nullopt: neither.
std::optional<size_t> digits_in(std::string_view format) {
  if (format.empty()) return 0;
  if (!format.starts_with(":0") || format.size() < 3) return std::nullopt;
  format.remove_prefix(2);
  const auto digits = number_in<size_t>(format);
  return digits && *digits >= 1 && *digits <= kMostDigits ? digits : std::nullopt;
}

}  // namespace

StepNames::Parts StepNames::parse(const std::string& pattern) {
  const size_t begin = pattern.find(kPlace);
  const size_t end = begin == std::string::npos ? begin : pattern.find('}', begin);
  if (end == std::string::npos) refuse_pattern(pattern, "has no {step}");
  const size_t format = begin + kPlace.size();
  const auto digits = digits_in(std::string_view(pattern).substr(format, end - format));
  if (!digits) refuse_pattern(pattern, "has a {step} with a format that is not like :08");
  Parts parts{pattern.substr(0, begin), pattern.substr(end + 1), *digits};
  const std::string around = parts.before + parts.after;
  if (around.find_first_of("{}/") != std::string::npos || around.find('\0') != std::string::npos) {
    refuse_pattern(pattern, "has a slash, or a brace outside of {step}");
  }
  if (pattern.front() == '.') refuse_pattern(pattern, "begins with a dot");
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  if ((!parts.before.empty() && is_digit(parts.before.back())) ||
      (!parts.after.empty() && is_digit(parts.after.front()))) {
    refuse_pattern(pattern, "has a digit beside {step}");
  }
  return parts;
}

StepNames::StepNames(std::string pattern) : known_{parse(pattern)} {
  for (const char* other : kOtherPatterns) known_.push_back(parse(other));
}

std::string StepNames::Parts::name_of(uint64_t step) const {
  return fmt::format("{}{:0{}}{}", before, step, std::max<size_t>(digits, 1), after);
}

std::optional<uint64_t> StepNames::Parts::step_of(std::string_view name) const {
  if (name.size() <= before.size() + after.size()) return std::nullopt;
  if (!name.starts_with(before) || !name.ends_with(after)) return std::nullopt;
  const std::string_view number =
      name.substr(before.size(), name.size() - before.size() - after.size());
  const auto step = number_in<uint64_t>(number);
  return step && name_of(*step) == name ? step : std::nullopt;
}

std::string StepNames::name_of(uint64_t step) const { return known_.front().name_of(step); }

std::optional<uint64_t> StepNames::step_of(std::string_view name) const {
  for (const Parts& parts : known_) {
    if (const auto step = parts.step_of(name)) return step;
  }
  return std::nullopt;
}

}  // namespace tilestone
