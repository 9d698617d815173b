#include "tilestone/cli/opened.h"

namespace tilestone::cli {

Location location_of(const std::string& path, bool follow_links) {
  PosixOptions options;
  if (follow_links) options.links = PosixOptions::Links::kAll;
  return Location(path, options);
}

void refuse_key(const Checkpoint& checkpoint, const std::string& key) {
  Error refused(ErrorCode::kInvalidArgument, "the checkpoint does not have this key");
  refused.with_key(key);
  std::string hint;
  for (const std::string& other : similar_keys(checkpoint.metadata(), key)) {
    hint += (hint.empty() ? "similar keys: " : ", ") + other;
  }
  throw refused.with_hint(hint.empty() ? "`tilestone ls` lists the keys" : hint);
}

}  // namespace tilestone::cli
