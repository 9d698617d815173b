#include "tilestone/format/known/known.h"

#include <algorithm>

#include "tilestone/base/error.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/megatron_mark.h"
#include "tilestone/format/safetensors/safetensors.h"
#include "tilestone/format/torch_checkpointing/torch_checkpointing.h"
#include "tilestone/format/torch_dist/torch_dist.h"
#include "tilestone/format/torch_save/torch_save.h"
#include "tilestone/format/zarr/zarr.h"

namespace tilestone {
namespace {

template <typename T>
std::shared_ptr<const T> named(const std::vector<std::shared_ptr<const T>>& known,
                               std::string_view name, std::string_view what) {
  std::string names;
  for (const auto& each : known) {
    if (each->name() == name) return each;
    names += (names.empty() ? "" : ", ") + std::string(each->name());
  }
  throw Error(ErrorCode::kUnsupported,
              "unknown " + std::string(what) + " \"" + std::string(name) + "\"")
      .with_hint("use one of: " + names);
}

// Whether a checkpoint with a metadata.json is in Megatron-Core's dialect. In a format that has a
// metadata.json of its own (zarr), only common.pt shows it.
bool is_megatron(const Format& format, std::span<const std::string> names) {
  const std::vector<std::string> own = format.index_files(names);
  return std::find(own.begin(), own.end(), kMegatronConfig) == own.end() ||
         contains_name(names, kMegatronCommon);
}

}  // namespace

std::vector<std::shared_ptr<const Format>> known_formats() {
  return {torch_dist_format(), zarr_format()};
}
std::vector<std::shared_ptr<const Format>> readable_formats() {
  std::vector<std::shared_ptr<const Format>> formats = known_formats();
  formats.push_back(safetensors_format());
  formats.push_back(torch_save_format());
  formats.push_back(torch_checkpointing_format());
  return formats;
}
std::vector<std::shared_ptr<const Dialect>> known_dialects() {
  return {pytorch_dialect(), megatron_dialect()};
}

std::shared_ptr<const Format> format_named(std::string_view name) {
  return named(readable_formats(), name, "format");
}

std::shared_ptr<const Dialect> dialect_named(std::string_view name) {
  return named(known_dialects(), name, "dialect");
}

std::shared_ptr<const Dialect> save_dialect_named(std::string_view name) {
  auto shards = megatron_shards_dialect();
  return shards->name() == name ? shards : dialect_named(name);
}

// If metadata.json is damaged, the format is detected by the other file names.
DetectedFormat detect_format(std::span<const std::string> names,
                             const std::function<Bytes(const std::string&)>& read) {
  const auto megatron = find_megatron_mark(names, read);
  for (const auto& format : known_formats()) {
    if (!format->detect(names)) continue;
    if (!megatron) return {format, pytorch_dialect()};
    if (!megatron->backend.empty() && megatron->backend != format->name()) continue;
    return {format, is_megatron(*format, names) ? megatron_dialect() : pytorch_dialect()};
  }
  return {};
}

DetectedFormat detect_readable(std::span<const std::string> names,
                               const std::function<Bytes(const std::string&)>& read) {
  if (DetectedFormat found = detect_format(names, read); found.format != nullptr) return found;
  for (const auto& format : readable_formats()) {
    if (format->detect(names)) return {format, pytorch_dialect()};
  }
  return {};
}

}  // namespace tilestone
