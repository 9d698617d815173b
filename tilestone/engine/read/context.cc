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
  // From a file's name, which is known to be one: the metadata's save id may be anything.
  const auto own = parse_own_name(context.format, files.front());
  if (own) return !context.storage.stat(manifest_name(own->save_id));
  // A directory that was exchanged loses its index before its data files.
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
