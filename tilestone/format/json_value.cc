#include "tilestone/format/json_value_internal.h"

#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "tilestone/base/error.h"

namespace tilestone {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr int kMaxJsonNesting = 16;

Value json_to_value(const OrderedJson& json, int depth) {
  if (depth > kMaxJsonNesting) throw Error(ErrorCode::kCorrupt, "the JSON is nested too deeply");
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_number_unsigned()) return json.get<uint64_t>();
  if (json.is_number_integer()) return json.get<int64_t>();
  if (json.is_number()) return json.get<double>();
  if (json.is_string()) return json.get<std::string>();
  if (json.is_array()) {
    Value::List items;
    for (const OrderedJson& item : json) items.push_back(json_to_value(item, depth + 1));
    return Value::list(std::move(items));
  }
  if (!json.is_object()) return {};
  Value::Dict items;
  for (const auto& [key, item] : json.items())
    items.emplace_back(key, json_to_value(item, depth + 1));
  return Value::dict(std::move(items));
}

}  // namespace

Value value_of_json(std::string_view text) {
  try {
    return json_to_value(OrderedJson::parse(text), 0);
  } catch (const nlohmann::json::exception& error) {
    throw Error(ErrorCode::kCorrupt, std::string("not JSON: ") + error.what());
  }
}

}  // namespace tilestone
