#include "tilestone/format/foreign.h"

#include <algorithm>
#include <string_view>

#include "tilestone/format/index.h"
#include "tilestone/format/megatron_mark.h"

namespace tilestone {
namespace {

// Whether the file marks an array or group in the directory itself or one level below it.
bool is_zarr_mark(std::string_view name) {
  if (std::count(name.begin(), name.end(), '/') > 1) return false;
  const std::string_view base = name.substr(name.rfind('/') + 1);
  return base == ".zarray" || base == ".zgroup" || base == "zarr.json";
}

// torch_checkpointing's index is optional. Then the files of rank 0 may be a user's own, but for
// this one.
std::optional<std::string> find_torch_checkpointing(std::span<const std::string> names) {
  if (contains_name(names, "model_0.pt")) return "model_0.pt";
  const bool has_files =
      std::ranges::any_of(names, [](const std::string& name) { return name.ends_with("_0.pt"); });
  if (!has_files || !contains_name(names, "metadata.pkl")) return std::nullopt;
  return "metadata.pkl";
}

}  // namespace

std::optional<ForeignCheckpoint> find_foreign(
    std::span<const std::string> names, const std::function<Bytes(const std::string&)>& read) {
  if (const auto megatron = find_megatron_mark(names, read)) {
    const std::string kind = megatron->backend.empty()
                                 ? "a damaged Megatron-Core checkpoint"
                                 : "a Megatron-Core checkpoint (" + megatron->backend + ")";
    return ForeignCheckpoint{kind, std::string(kMegatronConfig), true};
  }
  for (const char* mark : {"model.safetensors.index.json", "model.safetensors"}) {
    if (contains_name(names, mark))
      return ForeignCheckpoint{"a Hugging Face checkpoint", mark, false};
  }
  if (const auto file = find_torch_checkpointing(names)) {
    return ForeignCheckpoint{"a checkpoint of torch_checkpointing", *file, false};
  }
  const auto legacy = std::find_if(names.begin(), names.end(), [](const std::string& name) {
    return name.starts_with("mp_rank_");
  });
  if (legacy != names.end()) {
    return ForeignCheckpoint{"a checkpoint in Megatron's legacy format (torch)", *legacy, false};
  }
  const auto zarr = std::find_if(names.begin(), names.end(), is_zarr_mark);
  if (zarr != names.end()) return ForeignCheckpoint{"a zarr store", *zarr, true};
  return std::nullopt;
}

}  // namespace tilestone
