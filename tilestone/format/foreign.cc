#include "tilestone/format/foreign.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>

namespace tilestone {
namespace {

using Json = nlohmann::json;

constexpr int kMaxDepth = 8;  // of the JSON that is kept

bool is_there(std::span<const std::string> names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// The value of "sharded_backend"; nullopt where the bytes are not what Megatron-Core writes.
std::optional<std::string> sharded_backend(ByteView bytes) {
  const auto keep = [](int depth, Json::parse_event_t, const Json&) { return depth <= kMaxDepth; };
  const auto* text = reinterpret_cast<const char*>(bytes.data());
  const Json json = Json::parse(text, text + bytes.size(), keep, false);
  if (!json.is_object() || !json.contains("sharded_backend")) return std::nullopt;
  const Json& backend = json["sharded_backend"];
  return backend.is_string() ? backend.get<std::string>() : std::string("unknown");
}

// An array or group at the top of the directory, or one level below it.
bool is_zarr_mark(std::string_view name) {
  if (std::count(name.begin(), name.end(), '/') > 1) return false;
  const std::string_view base = name.substr(name.rfind('/') + 1);
  return base == ".zarray" || base == ".zgroup" || base == "zarr.json";
}

}  // namespace

std::optional<ForeignCheckpoint> find_foreign(
    std::span<const std::string> names, const std::function<Bytes(const std::string&)>& read) {
  if (is_there(names, "metadata.json")) {
    if (const auto backend = sharded_backend(read("metadata.json"))) {
      return ForeignCheckpoint{"a Megatron-Core checkpoint (" + *backend + ")", "metadata.json",
                               true};
    }
    if (is_there(names, "common.pt")) {
      return ForeignCheckpoint{"a damaged Megatron-Core checkpoint", "metadata.json", true};
    }
  }
  for (const char* mark : {"model.safetensors.index.json", "model.safetensors"}) {
    if (is_there(names, mark)) return ForeignCheckpoint{"a Hugging Face checkpoint", mark, false};
  }
  const auto zarr = std::find_if(names.begin(), names.end(), is_zarr_mark);
  if (zarr != names.end()) return ForeignCheckpoint{"a zarr store", *zarr, true};
  return std::nullopt;
}

}  // namespace tilestone
