#include "tilestone/engine/read/context_internal.h"

#include <algorithm>
#include <cerrno>
#include <memory>
#include <string>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/description_internal.h"
#include "tilestone/format/manifest.h"

namespace tilestone::engine {
namespace {

// Looks for the manifest of the metadata's save id, which may be any text, and for that of the save
// id in the first file's name. After a removal of keys the two differ.
bool has_manifest_still(const ReadContext& context) {
  const auto is_there = [&](const std::string& save_id) {
    return context.storage.stat(manifest_name(save_id)).has_value();
  };
  const std::string& save_id = context.metadata.save_id;
  if (is_save_id(save_id) && is_there(save_id)) return true;
  const auto own = parse_tilestone_name(context.metadata.files.front());
  return own && is_there(own->save_id);
}

// Whether the index still belongs to the same save and names the same files.
bool has_same_index(const ReadContext& context) {
  const std::shared_ptr<const Format> borrowed(std::shared_ptr<const Format>(), &context.format);
  const ExistingCheckpoint existing = read_existing(context.storage, borrowed);
  const std::vector<std::string>& files = context.metadata.files;
  // Metadata of one rank of a rank-local checkpoint and that of all ranks have different save ids.
  const bool is_same_save =
      existing.save_id == context.metadata.save_id || !existing.rank_local.empty();
  return existing.found && is_same_save &&
         std::all_of(files.begin(), files.end(),
                     [&](const std::string& name) { return existing.files.contains(name); });
}

// Why a file of the checkpoint is not there, though the checkpoint was opened.
std::string lost_hint(const ReadContext& context) {
  const std::shared_ptr<const Format> borrowed(std::shared_ptr<const Format>(), &context.format);
  if (context.storage.stands() && !read_existing(context.storage, borrowed).found) {
    return "no checkpoint is here: it was removed since it was opened, or this rank sees another "
           "directory than the rank that has opened it (all ranks need one file system at this "
           "path)";
  }
  return "another save may have replaced the checkpoint since it was opened: open it again";
}

}  // namespace

CachePolicy cache_policy(std::optional<CachePolicy> asked, uint64_t bytes, uint64_t ranks,
                         uint64_t available) {
  const bool fits = bytes <= available / 2 / ranks;
  return asked.value_or(fits ? CachePolicy::kKeep : CachePolicy::kBypass);
}

bool was_replaced(const ReadContext& context) {
  if (context.metadata.files.empty()) return false;
  return context.has_manifest ? !has_manifest_still(context) : !has_same_index(context);
}

std::unique_ptr<ReadableFile> open_data(const ReadContext& context, uint32_t file) {
  try {
    return context.storage.open(context.metadata.files[file]);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kNotFound) throw;
    if (was_replaced(context)) {
      throw Error(error).with_hint(lost_hint(context));
    }
    throw Error(ErrorCode::kCorrupt, "a data file of the checkpoint is missing")
        .with_file(error.file())
        .with_errno(ENOENT)
        .with_hint("`tilestone verify` shows what is lost with it");
  }
}

bool is_missing(const Error& error) {
  return error.code() == ErrorCode::kCorrupt && error.sys_errno() == ENOENT;
}

}  // namespace tilestone::engine
