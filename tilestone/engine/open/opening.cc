#include "tilestone/engine/open/opening_internal.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/open/attempt_files_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/tp_replicas_internal.h"
#include "tilestone/format/dialect/dialect.h"

namespace tilestone::engine {
namespace {

std::shared_ptr<const Format> format_or(std::string_view name,
                                        const std::shared_ptr<const Format>& wanted) {
  return wanted != nullptr ? wanted : format_named(name);
}

// "" for a dialect that this version does not know.
std::string_view mark_of(const std::string& dialect) {
  for (const auto& known : known_dialects()) {
    if (known->name() == dialect) return known->mark();
  }
  return "";
}

// A checkpoint whose switch is missing or damaged may look like one of another dialect.
void check_dialect(const Opened& opened, const Manifest& manifest) {
  if (manifest.dialect == opened.dialect->name()) return;
  const auto last = std::find_if(manifest.index.begin(), manifest.index.end(),
                                 [](const IndexSum& s) { return s.role == IndexRole::kSwitch; });
  Error error(ErrorCode::kCorrupt, "the checkpoint was saved in the dialect " + manifest.dialect +
                                       ", but the file that says so is missing or damaged");
  const std::string_view mark = mark_of(manifest.dialect);
  if (!mark.empty()) {
    error.with_file(std::string(mark));  // whether Tilestone or another program writes it
  } else if (last != manifest.index.end()) {
    error.with_file(last->name);
  }
  throw std::move(error).with_hint("the save may have been interrupted before it was published");
}

// Attaches the manifest to the metadata. If the index names no save, the manifest may belong to a
// checkpoint that another writer has overwritten; then it is ignored.
void add_manifest(Opened& opened, ByteView bytes) {
  std::string& save_id = opened.metadata.save_id;
  const bool named = !save_id.empty();
  const std::string name = named ? manifest_name(save_id) : std::string(kTilestoneDirectory);
  Manifest manifest = Manifest::decode(bytes, name);
  if (named && manifest.save_id != save_id) {
    throw Error(ErrorCode::kCorrupt, "the manifest belongs to the save " + manifest.save_id)
        .with_file(name);
  }
  if (named) check_dialect(opened, manifest);
  try {
    check_index(manifest, opened.files);
  } catch (Error& error) {
    // Then files with fixed names may be a mixture of two saves.
    if (opened.format->has_fixed_names()) {
      error.with_hint(
          std::string("if another program has saved a complete checkpoint here since, remove ") +
          std::string(kTilestoneDirectory) + " to read it");
      throw;
    }
    if (named) throw;
    return;
  }
  save_id = manifest.save_id;
  attach_manifest(opened.metadata, manifest);
  opened.manifest = std::move(manifest);
}

// Moves the common state's object out of the metadata, because it is not an object of the user.
void separate_common(Opened& opened) {
  const std::string_view key = opened.dialect->common_object();
  if (key.empty() || opened.metadata.find_object(key) == nullptr) return;
  std::vector<StoredObject>& objects = opened.metadata.objects;
  const auto found = std::find_if(objects.begin(), objects.end(),
                                  [&](const StoredObject& object) { return object.key == key; });
  opened.common = std::move(*found);
  objects.erase(found);
  opened.metadata.index();
}

}  // namespace

void expect_same_checkpoint(Storage& storage, const Opened& opened) {
  if (!opened.format->has_fixed_names()) return;
  bool same = true;
  if (opened.manifest) {
    same = storage.stat(manifest_name(opened.manifest->save_id)).has_value();
  } else {
    for (const std::string& name : storage.list(std::string(kTilestoneDirectory) + "/")) {
      same = same && kind_of(name) != kManifestKind;
    }
  }
  if (same) return;
  throw Error(ErrorCode::kNotFound, "the checkpoint at " + storage.describe() +
                                        " is not the one that the coordinator (rank 0) has opened")
      .with_hint(
          "another save may have replaced the checkpoint since it was opened: open it again; or "
          "this "
          "rank sees another directory (all ranks need one file system at this path)");
}

Opened open_description(DescribingFiles description, const std::shared_ptr<const Format>& wanted,
                        SecondNames names) {
  Opened opened;
  opened.format = format_or(description.format, wanted);
  opened.dialect = dialect_named(description.dialect);
  opened.files = std::move(description.files);
  if (!description.metadata) description.metadata = opened.format->parse_index(opened.files);
  opened.metadata = std::move(*description.metadata);
  opened.metadata.dialect = opened.dialect->name();
  const bool may_have_second = opened.dialect->has_replica_names();
  if (may_have_second) opened.replica_names = take_replica_names(opened.metadata);
  if (!description.manifest.empty()) add_manifest(opened, description.manifest);
  separate_common(opened);
  if (names == SecondNames::kUnited && may_have_second) {
    opened.replica_places = unite_tp_replicas(opened.metadata);
  }
  return opened;
}

}  // namespace tilestone::engine
