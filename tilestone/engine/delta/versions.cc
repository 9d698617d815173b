#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>

#include "tilestone/base/bytes.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/delta/delta_file_internal.h"
#include "tilestone/engine/delta/versions_internal.h"
#include "tilestone/engine/run/rounds_internal.h"
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
std::string id_of(const Location& directory, const DeltaVersion& version) {
  const Location location(directory.storage().child(version.name));
  if (!version.whole) return DeltaFile::open(location).index().result;
  const Checkpoint checkpoint = Checkpoint::open(location);
  if (!checkpoint.save_record()) return "";
  const auto& attributes = checkpoint.save_record()->attributes;
  const auto found = attributes.find(std::string(kVersionId));
  return found != attributes.end() ? found->second : "";
}

}  // namespace

std::string version_name(uint64_t number) { return fmt::format("{}{:08}", kVersion, number); }

std::vector<DeltaVersion> versions_at(const Location& location) {
  Storage& storage = location.storage();
  std::vector<DeltaVersion> versions;
  for (const std::string& name : storage.list_directories()) {
    const auto number = number_of(name);
    if (!number) continue;
    const std::vector<std::string> files = storage.child(name)->list_files();
    const auto has = [&](std::string_view file) {
      return std::find(files.begin(), files.end(), file) != files.end();
    };
    const bool is_delta = has(kDeltaName);
    if (is_delta || has(".metadata")) versions.push_back({*number, name, !is_delta});
  }
  std::sort(versions.begin(), versions.end(),
            [](const DeltaVersion& a, const DeltaVersion& b) { return a.number < b.number; });
  return versions;
}

std::vector<DeltaVersion> agreed_versions(const DeltaCall& call, const Location& location) {
  Rounds rounds(call.comm, "delta_versions", call.location, call.deadline);
  const Bytes answer = rounds.run_last(
      "listing versions", [](Deadline) { return Bytes(); },
      [&](const std::vector<Bytes>& payloads) {
        const std::vector<DeltaVersion> found = versions_at(location);
        ByteWriter writer;
        writer.varint(found.size());
        for (const DeltaVersion& version : found) {
          writer.u64(version.number);
          writer.u8(version.whole ? 1 : 0);
        }
        return std::vector<Bytes>(payloads.size(), writer.bytes());
      });
  ByteReader reader(answer, "the versions of a directory");
  std::vector<DeltaVersion> versions(reader.count(sizeof(uint64_t) + 1));
  for (DeltaVersion& version : versions) {
    version.number = reader.u64();
    version.name = version_name(version.number);
    version.whole = reader.u8() != 0;
  }
  return versions;
}

std::vector<DeltaVersion> chain_to(const std::vector<DeltaVersion>& versions, uint64_t number) {
  std::vector<DeltaVersion> chain;
  for (const DeltaVersion& version : versions) {
    if (version.number > number) break;
    if (version.whole) chain.clear();
    chain.push_back(version);
  }
  if (chain.empty() || chain.back().number != number) return {};
  for (size_t i = 0; i < chain.size(); ++i) {
    const uint64_t expected = number - (chain.size() - 1 - i);
    if (chain[i].number == expected) continue;
    throw Error(ErrorCode::kNotFound, version_name(expected) + " is missing");
  }
  return chain;
}

void expect_version_before(Storage& folder, const std::string& id) {
  const auto entry = folder.parent();
  const auto number = entry ? number_of(entry->name) : std::nullopt;
  if (!number) return;
  const Location directory(entry->storage);
  for (const DeltaVersion& version : versions_at(directory)) {
    if (version.number + 1 != *number) continue;
    const std::string found = id_of(directory, version);
    if (found.empty() || found == id) continue;
    throw Error(ErrorCode::kMismatch,
                fmt::format("the base is not {}, which is the version before: "
                            "its id is {}, that of the base {}",
                            version.name, found, id))
        .with_hint("save a whole version (base=None), so that readers can go on");
  }
}

std::string chain_text(Storage& delta) {
  const auto entry = delta.parent();
  const auto number = entry ? number_of(entry->name) : std::nullopt;
  if (!number) return "";
  try {
    std::string text;
    for (const DeltaVersion& version : chain_to(versions_at(Location(entry->storage)), *number)) {
      text += (text.empty() ? "" : ", ") + version.name + (version.whole ? " (whole)" : "");
    }
    return text;
  } catch (const Error&) {
    return "";
  }
}

}  // namespace tilestone::engine
