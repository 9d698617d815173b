#include "tilestone/format/json_value_internal.h"

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"

namespace tilestone {
namespace {

using Json = nlohmann::json;

constexpr int kMaxJsonNesting = 16;

[[noreturn]] void refuse_json(const std::string& problem) {
  throw Error(ErrorCode::kCorrupt, "not JSON, or not as expected: " + problem);
}

// Refuses keys that occur twice, and what is nested too deeply.
Json parse_strictly(std::string_view text) {
  using Event = Json::parse_event_t;
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  const auto check = [&](int depth, Event event, const Json& parsed) {
    if (depth > kMaxJsonNesting) refuse_json("it is nested too deeply");
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key && !keys.back().insert(parsed.get<std::string>()).second) {
      refuse_json("a key occurs twice: " + parsed.dump());
    }
    return true;
  };
  // The parser takes it for the end of the text.
  if (text.find('\0') != std::string_view::npos) refuse_json("a NUL byte");
  return Json::parse(text, check);
}

Value json_to_value(const Json& json) {
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_number_unsigned()) return json.get<uint64_t>();
  if (json.is_number_integer()) return json.get<int64_t>();
  if (json.is_number()) return json.get<double>();
  if (json.is_string()) return json.get<std::string>();
  if (json.is_array()) {
    Value::List items;
    for (const Json& item : json) items.push_back(json_to_value(item));
    return Value::list(std::move(items));
  }
  if (!json.is_object()) return {};
  Value::Dict items;
  for (const auto& [key, item] : json.items()) items.emplace_back(key, json_to_value(item));
  return Value::dict(std::move(items));
}

}  // namespace

Value value_of_json(std::string_view text) {
  try {
    return json_to_value(parse_strictly(text));
  } catch (const Json::exception& error) {
    refuse_json(error.what());
  }
}

}  // namespace tilestone
