#include "tilestone/engine/convert/one_file_target_internal.h"

#include <string>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/base/uuid.h"
#include "tilestone/engine/commit/sibling_internal.h"

namespace tilestone::engine {
namespace {

void make_target(const Location& location, const WriteFile& write, bool is_folder) {
  Storage& storage = location.storage();
  const auto entry = storage.parent();  // there is none above a checkpoint that is one file
  const bool is_file = entry && entry->storage->stat(entry->name).has_value();
  if (is_file || ((is_folder || !entry) && !storage.list().empty())) {
    throw Error(ErrorCode::kAlreadyExists, "something exists at " + location.describe())
        .with_hint("convert to another name, or remove it first");
  }
  if (!entry) {
    throw Error(ErrorCode::kUnsupported, std::string("no ") + (is_folder ? "folder" : "file") +
                                             " can be made at " + location.describe());
  }
  NewSibling sibling(location.shared(), random_uuid());
  try {
    sibling.begin();
    sibling.publish_part(write(sibling.storage(), entry->name), is_folder);
  } catch (...) {
    sibling.abandon();
    throw;
  }
  sibling.abandon();  // only the directory is left
}

}  // namespace

void make_one_file(const Location& location, const WriteFile& write) {
  make_target(location, write, false);
}

void make_folder(const Location& location, const WriteFile& write) {
  make_target(location, write, true);
}

}  // namespace tilestone::engine
