// Where a step stands in the history of its run, as its checkpoint says.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/number_text.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/training_run/look_internal.h"
#include "tilestone/format/manifest.h"

namespace tilestone {
namespace {

constexpr const char* kRun = "line.run";
constexpr const char* kOrdinal = "line.ordinal";
constexpr const char* kParent = "line.parent";  // the step, a space, and the save id
constexpr const char* kAfter = "line.after";

std::string_view attribute_in(const std::map<std::string, std::string>& attributes,
                              const char* name) {
  const auto found = attributes.find(name);
  return found == attributes.end() ? std::string_view() : std::string_view(found->second);
}

}  // namespace

std::map<std::string, std::string> to_attributes(const Lineage& lineage) {
  std::map<std::string, std::string> attributes = {{kRun, lineage.run},
                                                   {kOrdinal, std::to_string(lineage.ordinal)}};
  if (const auto& parent = lineage.parent) {
    attributes.emplace(kParent, fmt::format("{} {}", parent->step, parent->save_id));
  }
  if (lineage.after) attributes.emplace(kAfter, std::to_string(*lineage.after));
  return attributes;
}

Lineage lineage_of(const std::map<std::string, std::string>& attributes) {
  Lineage lineage;
  const auto ordinal = number_in<uint64_t>(attribute_in(attributes, kOrdinal));
  if (!ordinal || *ordinal == 0 || attribute_in(attributes, kRun).empty()) return lineage;
  lineage.run = attribute_in(attributes, kRun);
  lineage.ordinal = *ordinal;
  lineage.after = number_in<uint64_t>(attribute_in(attributes, kAfter));
  const std::string_view parent = attribute_in(attributes, kParent);
  const size_t space = std::min(parent.find(' '), parent.size());
  if (const auto step = number_in<uint64_t>(parent.substr(0, space))) {
    lineage.parent = StepId{*step, std::string(parent.substr(std::min(space + 1, parent.size())))};
  }
  return lineage;
}

std::string run_name(const Lineage& lineage) {
  return lineage.run.empty() ? kOlderRun : lineage.run;
}

namespace engine {
namespace {

ManifestHead read_manifest_head(Storage& storage, const std::string& name) {
  const auto file = storage.open(name);
  const auto read = [&](uint64_t size) {
    Bytes bytes(std::min(size, file->size()));
    const ReadOp op{file.get(), 0, bytes.size(), bytes.data()};
    if (!bytes.empty()) storage.read({&op, 1}, {}, [](size_t, ByteView) {});
    return bytes;
  };
  return decode_manifest_head(read(manifest_head_bytes(read(kManifestStart), name)), name);
}

}  // namespace

void read_lineage(Storage& storage, StepInfo& info) {
  for (const std::string& name : storage.list_files(std::string(kTilestoneDirectory) + "/")) {
    if (kind_of(name) != kManifestKind) continue;
    try {
      const ManifestHead head = read_manifest_head(storage, name);
      const Lineage lineage = lineage_of(head.attributes);
      if (!info.save_id.empty() && lineage.ordinal <= info.lineage.ordinal) continue;
      info.save_id = head.save_id;
      info.lineage = lineage;
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kNotFound) continue;  // removed meanwhile
      info.state = StepState::kDamaged;
      info.problem = error.what();
    }
  }
}

}  // namespace engine
}  // namespace tilestone
