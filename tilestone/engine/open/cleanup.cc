#include <algorithm>
#include <random>

#include "tilestone/base/error.h"
#include "tilestone/base/log.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/format/manifest.h"

namespace tilestone::engine {
namespace {

constexpr size_t kSaveIdLength = 36;
constexpr std::string_view kTemporarySuffix = ".tmp";
constexpr std::string_view kDataKind = "data file";

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_hex(char c) { return is_digit(c) || (c >= 'a' && c <= 'f'); }

bool is_save_id(std::string_view text) {
  if (text.size() != kSaveIdLength) return false;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool dash = i == 8 || i == 13 || i == 18 || i == 23;
    if (dash ? text[i] != '-' : !is_hex(text[i])) return false;
  }
  return true;
}

std::optional<OwnName> parse_data_file(const Format& format, std::string_view name) {
  auto parts = format.parse_data_file_name(name);
  if (!parts || !is_save_id(parts->save_id)) return std::nullopt;
  return OwnName{kDataKind, std::move(parts->save_id)};
}

bool has_all_files(Storage& storage, const Manifest& manifest) {
  for (const RankReport& report : manifest.reports) {
    for (const ReportedFile& file : report.files) {
      const auto info = storage.stat(file.name);
      if (!info || !info->regular || info->size != file.size) return false;
    }
  }
  return true;
}

bool is_file(Storage& storage, const std::string& name) {
  const auto info = storage.stat(name);
  return info && info->regular;
}

// The manifest of this save, if it is there, whole, and so is all that it names.
std::optional<Manifest> complete_save(Storage& storage, const std::string& save_id) {
  try {
    const std::string name = manifest_name(save_id);
    Manifest manifest = Manifest::decode(read_file(storage, name, UINT64_MAX), name);
    if (manifest.save_id == save_id && has_all_files(storage, manifest)) return manifest;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kIo) throw;  // then it is not known
  }
  return std::nullopt;
}

// The file whose publishing would have been the commit.
std::string switch_of(const Manifest& manifest) {
  for (const IndexSum& sum : manifest.index) {
    if (sum.role == IndexRole::kSwitch) return sum.name;
  }
  return "index";
}

}  // namespace

std::string temporary_name(std::string_view save_id, std::string_view what) {
  std::string name(kOwnDirectory);
  name.append("/").append(save_id).append(".").append(what).append(kTemporarySuffix);
  return name;
}

std::string random_save_id() {
  constexpr std::string_view kHex = "0123456789abcdef";
  constexpr std::string_view kTemplate = "xxxxxxxx-xxxx-4xxx-yxxx-xxxxxxxxxxxx";
  std::random_device random;
  std::string id(kTemplate);
  for (char& c : id) {
    const unsigned digit = random() & 15u;
    if (c == 'x') c = kHex[digit];
    if (c == 'y') c = kHex[8 + (digit & 3u)];
  }
  return id;
}

std::optional<OwnName> parse_in_own_directory(std::string_view name) {
  const std::string prefix = std::string(kOwnDirectory) + "/";
  if (!name.starts_with(prefix)) return std::nullopt;
  const std::string_view base = name.substr(prefix.size());
  const std::string save_id(base.substr(0, kSaveIdLength));
  if (!is_save_id(save_id)) return std::nullopt;
  if (name == manifest_name(save_id)) return OwnName{kManifestKind, save_id};
  if (!base.substr(kSaveIdLength).starts_with('.') || !base.ends_with(kTemporarySuffix)) {
    return std::nullopt;
  }
  return OwnName{"temporary file", save_id};
}

std::optional<OwnName> parse_own_name(const Format& format, std::string_view name) {
  if (auto own = parse_in_own_directory(name)) return own;
  return parse_data_file(format, name);
}

bool is_own_name(const Format& format, std::string_view name) {
  return parse_own_name(format, name).has_value();
}

std::vector<std::string> leftovers(const Format& format, std::span<const std::string> names,
                                   const std::set<std::string>& referenced) {
  std::vector<std::string> found;
  for (const std::string& name : names) {
    if (!referenced.contains(name) && is_own_name(format, name)) found.push_back(name);
  }
  return found;
}

std::optional<LostCheckpoint> find_lost(Storage& storage, const Format& format,
                                        std::span<const std::string> names) {
  const std::string hint =
      "copy the checkpoint once more with its hidden files (cp -a FROM/. TO), if it still stands "
      "elsewhere";
  const bool locked_once = std::find(names.begin(), names.end(), kLockName) != names.end();
  for (const std::string& name : names) {
    const auto own = parse_own_name(format, name);
    const bool is_manifest = own && own->kind == kManifestKind;
    if (const auto manifest = is_manifest ? complete_save(storage, own->save_id) : std::nullopt) {
      return LostCheckpoint{own->save_id,
                            "the checkpoint of the save " + own->save_id + " has lost only its " +
                                switch_of(*manifest) +
                                ": its manifest and all its data files are in " +
                                storage.describe(),
                            hint};
    }
    if (own && own->kind == kDataKind && !locked_once && is_file(storage, name)) {
      return LostCheckpoint{own->save_id,
                            "data files of the save " + own->save_id + " are in " +
                                storage.describe() + " without the hidden files (" +
                                std::string(".metadata, ") + std::string(kOwnDirectory) +
                                ") of their checkpoint",
                            hint};
    }
  }
  return std::nullopt;
}

void remove_files(Storage& storage, std::span<const std::string> names) {
  for (const std::string& name : names) {
    try {
      storage.remove(name);
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kNotFound) continue;
      log(LogLevel::kWarning, std::string("a file that is not needed stays: ") + error.what());
    }
  }
}

}  // namespace tilestone::engine
