#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>

#include "tilestone/base/error.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/delta/delta_file_internal.h"
#include "tilestone/engine/delta/versions_internal.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {
namespace {

constexpr std::string_view kVersion = "version-";

std::optional<uint64_t> number_of(std::string_view name) {
  if (!name.starts_with(kVersion)) return std::nullopt;
  uint64_t number = 0;
  const char* const end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data() + kVersion.size(), end, number);
  const bool is_version = error == std::errc() && stop == end && version_name(number) == name;
  return is_version ? std::optional(number) : std::nullopt;
}

// The id of a version; "" if it is a checkpoint that says none.
std::string id_of(const Location& version) {
  if (is_whole(version.storage()) == false) return DeltaFile::open(version).index().result;
  const Checkpoint checkpoint = Checkpoint::open(version);
  if (!checkpoint.save_record()) return "";
  const auto& attributes = checkpoint.save_record()->attributes;
  const auto found = attributes.find(std::string(kVersionId));
  return found != attributes.end() ? found->second : "";
}

}  // namespace

std::optional<bool> is_whole(Storage& version) {
  if (version.stat(std::string(kDeltaName))) return false;
  return version.stat(".metadata") ? std::optional(true) : std::nullopt;
}

void expect_no_delta(const Location& base) {
  if (is_whole(base.storage()) != false) return;
  throw Error(ErrorCode::kInvalidArgument, "the base is a delta and not a checkpoint")
      .with_file(base.describe())
      .with_hint("pass the version that save_delta returned, or a checkpoint with these weights");
}

std::string version_name(uint64_t number) { return fmt::format("{}{:08}", kVersion, number); }

std::vector<DeltaVersion> versions_at(const Location& location) {
  Storage& storage = location.storage();
  std::vector<DeltaVersion> versions;
  for (const std::string& name : storage.list_directories()) {
    const auto number = number_of(name);
    if (!number) continue;
    const auto whole = is_whole(*storage.child(name));
    if (whole) versions.push_back({*number, *whole});
  }
  std::sort(versions.begin(), versions.end(),
            [](const DeltaVersion& a, const DeltaVersion& b) { return a.number < b.number; });
  return versions;
}

void expect_version_before(Storage& folder, const std::string& id) {
  const auto entry = folder.parent();
  const auto number = entry ? number_of(entry->name) : std::nullopt;
  if (!number || *number == 0) return;
  const std::string name = version_name(*number - 1);
  const auto before = entry->storage->child(name);
  if (!is_whole(*before)) return;
  const std::string found = id_of(Location(before));
  if (found == id) return;
  const std::string said =
      found.empty() ? "it has no id, because save() has made it" : "its id is " + found;
  throw Error(
      ErrorCode::kMismatch,
      fmt::format("the base is not {}, which is the version before: {}, that of the base {}", name,
                  said, id))
      .with_hint("save a whole version (base=None), so that readers can go on");
}

std::string chain_text(Storage& delta) {
  const auto entry = delta.parent();
  const auto number = entry ? number_of(entry->name) : std::nullopt;
  if (!number) return "";
  try {
    std::string text;
    uint64_t next = 0;  // without a gap so far
    for (const DeltaVersion& version : versions_at(Location(entry->storage))) {
      if (version.number > *number) break;
      if (version.whole) text.clear();
      if (!version.whole && version.number != next) return "";
      text += (text.empty() ? "" : ", ") + version_name(version.number) +
              (version.whole ? " (whole)" : "");
      next = version.number + 1;
    }
    return next == *number + 1 ? text : "";
  } catch (const Error&) {
    return "";
  }
}

}  // namespace tilestone::engine
