#include "tilestone/engine/read/context_internal.h"

#include <string>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/format/manifest.h"

namespace tilestone::engine {

bool was_replaced(const ReadContext& context) {
  const std::vector<std::string>& files = context.metadata.files;
  if (files.empty()) return false;
  const auto own = parse_own_name(files.front());
  if (own) {
    // Look for the manifest of the metadata's save id, which may be any text, and for that of the
    // save id in the first file's name. After a removal of keys the two differ.
    const auto has_manifest = [&](const std::string& save_id) {
      return context.storage.stat(manifest_name(save_id)).has_value();
    };
    const std::string& save_id = context.metadata.save_id;
    return !(is_save_id(save_id) && has_manifest(save_id)) && !has_manifest(own->save_id);
  }
  // When the content of a directory is replaced, its index goes before its data files.
  return !context.format.detect(context.storage.list());
}

std::unique_ptr<ReadableFile> open_data(const ReadContext& context, uint32_t file) {
  try {
    return context.storage.open(context.metadata.files[file]);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kNotFound || !was_replaced(context)) throw;
    throw Error(error).with_hint(
        "another save may have replaced the checkpoint since it was opened: open it again");
  }
}

}  // namespace tilestone::engine
