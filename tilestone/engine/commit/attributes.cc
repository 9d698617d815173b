#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/commit/attributes_internal.h"
#include "tilestone/engine/commit/sibling_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/opening_internal.h"
#include "tilestone/format/manifest.h"

namespace tilestone::engine {

void set_attributes(const std::shared_ptr<Storage>& location,
                    const std::map<std::string, std::string>& attributes, Deadline deadline) {
  const auto lock = claim_location(*location, deadline);
  if (lock == nullptr) fail_under_way(*location, "a save", "try again when it has ended");
  Found found = find_checkpoint(location, nullptr);
  const Opened opened = open_description(std::move(found.description), nullptr);
  if (!opened.has_manifest_file()) {
    throw Error(ErrorCode::kUnsupported,
                "the checkpoint at " + location->describe() + " has no manifest for attributes");
  }
  const std::string file = manifest_name(opened.manifest->save_id);
  const auto standing = found.storage->stat(file);  // before it is read
  Manifest manifest = Manifest::decode(read_file(*found.storage, file, UINT64_MAX), file);
  for (const auto& [name, value] : attributes) manifest.attributes.insert_or_assign(name, value);
  if (manifest.attributes == opened.manifest->attributes) return;
  const std::string tag = standing ? standing->tag : "";
  const Condition same = tag.empty() ? Condition::always() : Condition::has(tag);
  if (!found.storage->put(file, manifest.encode(), same,
                          temporary_name(manifest.save_id, "manifest"), deadline)) {
    fail_under_way(*location, "another change of the manifest", "try again");
  }
}

}  // namespace tilestone::engine
