#include <nlohmann/json.hpp>
#include <string>

#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/base/file_name.h"
#include "tilestone/format/json_value_internal.h"
#include "tilestone/format/safetensors/header_internal.h"
#include "tilestone/format/safetensors/weight_map_internal.h"

namespace tilestone::safetensors {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxText = size_t{256} << 20;  // bytes

[[noreturn]] void corrupt_index(const std::string& problem) {
  throw Error(ErrorCode::kCorrupt, "index of safetensors files: " + problem);
}

}  // namespace

WeightMap parse_weight_map(ByteView text, const std::string& file) {
  return with_file(file, [&] {
    if (text.size() > kMaxText) {
      corrupt_index("it has " + std::to_string(text.size()) + " bytes; the limit is " +
                    std::to_string(kMaxText));
    }
    const Value index = value_of_json(as_text(text), "index of safetensors files");
    const Value* const entries =
        index.kind() == Value::Kind::kDict ? index.find("weight_map") : nullptr;
    if (entries == nullptr || entries->kind() != Value::Kind::kDict) {
      corrupt_index("it has no object \"weight_map\"");
    }
    WeightMap map;
    for (const auto& [entry, file_name] : entries->as_dict()) {
      const std::string& key = entry.as_string();
      if (file_name.kind() != Value::Kind::kString) {
        corrupt_index("\"weight_map\" has no text at " + in_quotes(key));
      }
      const std::string& name = map[key] = file_name.as_string();
      check_file_name(name);
      if (name.find('/') == std::string::npos && name.ends_with(kFileSuffix)) continue;
      throw Error(ErrorCode::kUnsupported, "index of safetensors files: the tensor is in " +
                                               in_quotes(name) +
                                               ", which is not a safetensors file beside the index")
          .with_key(key);
    }
    return map;
  });
}

void expect_index_fits(const WeightMap& map) {
  uint64_t bytes = 128;
  for (const auto& [key, name] : map) bytes += Json(key).dump().size() + name.size() + 10;
  if (bytes <= kMaxText) return;
  throw Error(ErrorCode::kInvalidArgument, "the index of the safetensors files would have " +
                                               std::to_string(bytes) + " bytes; the limit is " +
                                               std::to_string(kMaxText))
      .with_hint("convert a part of the keys (`--keys`), or give them shorter names (`--rename`)");
}

Bytes write_weight_map(const WeightMap& map, uint64_t bytes) {
  Json files = Json::object();
  for (const auto& [key, name] : map) files[key] = name;
  const Json json = {{"metadata", {{"total_size", bytes}}}, {"weight_map", std::move(files)}};
  return to_bytes(json.dump(2) + "\n");
}

}  // namespace tilestone::safetensors
