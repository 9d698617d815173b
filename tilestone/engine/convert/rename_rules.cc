#include <algorithm>
#include <regex>
#include <sstream>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/convert/convert.h"
#include "tilestone/engine/convert/rename_rules_internal.h"

namespace tilestone {
namespace engine {
namespace {

// The library's regular expressions use stack for each character.
constexpr size_t kMaxKey = 4096;

// "\1" as "$1".
std::string as_format(const std::string& replacement) {
  std::string format;
  for (size_t i = 0; i < replacement.size(); ++i) {
    const bool group = replacement[i] == '\\' && i + 1 < replacement.size() &&
                       replacement[i + 1] >= '0' && replacement[i + 1] <= '9';
    format += group ? '$' : replacement[i];
  }
  return format;
}

// Each group that the replacement names must be in the pattern: the library would take it as empty.
void check_groups(const RenameRule& rule, const std::regex& pattern) {
  const std::string format = as_format(rule.replacement);
  for (size_t at = format.find('$'); at != std::string::npos && at + 1 < format.size();
       at = format.find('$', at + 1)) {
    if (format[at + 1] == '$') {
      ++at;
      continue;
    }
    if (format[at + 1] < '0' || format[at + 1] > '9') continue;
    const auto group = static_cast<unsigned>(format[at + 1] - '0');
    if (group <= pattern.mark_count()) continue;
    throw Error(ErrorCode::kInvalidArgument,
                "the rule \"" + rule.pattern + "=" + rule.replacement + "\" names group " +
                    std::to_string(group) + ", but it has " + std::to_string(pattern.mark_count()));
  }
}

std::regex compiled(const RenameRule& rule) {
  try {
    std::regex pattern(rule.pattern, std::regex::ECMAScript | std::regex::optimize);
    check_groups(rule, pattern);
    return pattern;
  } catch (const std::regex_error& error) {
    throw Error(ErrorCode::kInvalidArgument,
                "\"" + rule.pattern + "\" is not a regular expression: " + error.what());
  }
}

}  // namespace

struct RenameRules::State {
  std::vector<std::pair<std::regex, std::string>> rules;
};

RenameRules::RenameRules(const std::vector<RenameRule>& rules) : state_(std::make_unique<State>()) {
  for (const RenameRule& rule : rules) {
    state_->rules.emplace_back(compiled(rule), as_format(rule.replacement));
  }
}
RenameRules::~RenameRules() = default;

std::string RenameRules::apply(const std::string& key) const {
  if (state_->rules.empty()) return key;
  if (key.size() > kMaxKey) {
    throw Error(ErrorCode::kInvalidArgument, "the key is too long to be renamed: it has " +
                                                 std::to_string(key.size()) +
                                                 " bytes; the limit is " + std::to_string(kMaxKey))
        .with_key(key);
  }
  for (const auto& [pattern, format] : state_->rules) {
    std::smatch found;
    if (!std::regex_search(key, found, pattern)) continue;
    return found.prefix().str() + found.format(format) + found.suffix().str();
  }
  return key;
}

}  // namespace engine

RenameRule parse_rename_rule(const std::string& text) {
  const size_t at = text.rfind('=');
  if (at == std::string::npos || at == 0) {
    throw Error(ErrorCode::kInvalidArgument, "the rule \"" + text + "\" is not REGEX=NAME");
  }
  RenameRule rule{text.substr(0, at), text.substr(at + 1)};
  engine::compiled(rule);
  return rule;
}

std::vector<RenameRule> parse_rename_rules(const std::string& text) {
  std::vector<RenameRule> rules;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (line.empty() || line.front() == '#') continue;
    rules.push_back(parse_rename_rule(line));
  }
  return rules;
}

}  // namespace tilestone
