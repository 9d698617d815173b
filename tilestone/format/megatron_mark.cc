#include "tilestone/format/megatron_mark.h"

#include <nlohmann/json.hpp>

#include "tilestone/format/index.h"

namespace tilestone {
namespace {

using Json = nlohmann::json;

constexpr int kMaxDepth = 8;  // deeper JSON is dropped while parsing

Json parse(ByteView bytes) {
  const auto keep = [](int depth, Json::parse_event_t, const Json&) { return depth <= kMaxDepth; };
  const auto* text = reinterpret_cast<const char*>(bytes.data());
  return Json::parse(text, text + bytes.size(), keep, false);
}

// Whether the bytes are valid JSON without any of Megatron-Core's fields.
bool is_foreign_json(ByteView bytes) {
  const Json json = parse(bytes);
  const auto has = [&](const char* field) { return json.contains(field); };
  return !json.is_discarded() && !has("sharded_backend") && !has("sharded_backend_version") &&
         !has("common_backend") && !has("common_backend_version");
}

}  // namespace

std::optional<MegatronConfig> read_megatron_config(ByteView bytes) {
  const Json json = parse(bytes);
  if (!json.is_object() || !json.contains("sharded_backend")) return std::nullopt;
  const Json& backend = json["sharded_backend"];
  MegatronConfig config;
  config.backend = backend.is_string() ? backend.get<std::string>() : std::string("unknown");
  const auto version = json.find("sharded_backend_version");
  if (version != json.end()) {
    config.version = version->is_number_integer() ? version->get<int64_t>() : -1;
  }
  return config;
}

std::optional<MegatronHashes> read_megatron_hashes(ByteView bytes) {
  const Json json = parse(bytes);
  if (!json.is_object() || !json.contains("files") || !json["files"].is_object()) {
    return std::nullopt;
  }
  if (json.value("algorithm", Json()) != "sha256") return std::nullopt;
  MegatronHashes hashes;
  const Json save_id = json.value("save_id", Json());
  if (save_id.is_string()) hashes.save_id = save_id.get<std::string>();
  for (const auto& [name, hash] : json["files"].items()) {
    const bool is_inside =
        !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos;
    if (!is_inside || !hash.is_string()) return std::nullopt;
    hashes.files.emplace_back(name, hash.get<std::string>());
  }
  return hashes;
}

std::optional<MegatronMark> find_megatron_mark(
    std::span<const std::string> names, const std::function<Bytes(const std::string&)>& read) {
  if (!contains_name(names, kMegatronConfig)) return std::nullopt;
  const Bytes bytes = read(std::string(kMegatronConfig));
  if (auto config = read_megatron_config(bytes)) return MegatronMark{std::move(config->backend)};
  if (contains_name(names, kMegatronCommon) && !is_foreign_json(bytes)) return MegatronMark{};
  return std::nullopt;
}

Bytes write_megatron_config(std::string_view backend, int backend_version) {
  return to_bytes("{\"sharded_backend\": " + Json(backend).dump() +
                  ", \"sharded_backend_version\": " + std::to_string(backend_version) +
                  ", \"common_backend\": \"torch\", \"common_backend_version\": 1}");
}

}  // namespace tilestone
