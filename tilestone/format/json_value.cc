#include "tilestone/format/json_value_internal.h"

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/format/strict_json_internal.h"

namespace tilestone {
namespace {

using Json = nlohmann::json;

constexpr int kMaxJsonNesting = 16;

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

nlohmann::json strict_json(std::string_view text, std::string_view what) {
  using Event = Json::parse_event_t;
  const auto refuse = [&](const std::string& problem) {
    throw Error(ErrorCode::kCorrupt, std::string(what) + ": " + problem);
  };
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  const auto check = [&](int depth, Event event, const Json& parsed) {
    if (depth > kMaxJsonNesting) {
      refuse("the JSON is nested deeper than " + std::to_string(kMaxJsonNesting) + " levels");
    }
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event != Event::key) return true;
    const auto& key = parsed.get_ref<const std::string&>();
    if (!keys.back().insert(key).second) refuse("\"" + key.substr(0, 60) + "\" occurs twice");
    return true;
  };
  // The parser takes it for the end of the text.
  if (text.find('\0') != std::string_view::npos) refuse("invalid JSON: a NUL byte");
  try {
    return Json::parse(text, check);
  } catch (const Json::parse_error& error) {
    refuse("invalid JSON at byte " + std::to_string(error.byte));
  } catch (const Json::exception&) {
    refuse("invalid JSON");
  }
  return {};
}

Value value_of_json(std::string_view text, std::string_view what) {
  return json_to_value(strict_json(text, what));
}

}  // namespace tilestone
