#include "tilestone/cli/opened.h"

#include <filesystem>
#include <system_error>

#include "tilestone/base/error.h"

namespace tilestone::cli {

namespace {

// A file of another kind would be taken for a directory, which can't be listed.
void refuse_other_file(const std::string& path) {
  std::error_code none;
  for (const char* const kind : {".safetensors", ".pt", ".pth", ".bin", ".ckpt"}) {
    if (path.ends_with(kind)) return;
  }
  if (!std::filesystem::is_regular_file(path, none)) return;
  throw Error(ErrorCode::kNotFound, "no checkpoint at " + path + ": it is a file")
      .with_hint(
          "name the directory of the checkpoint; opened as files are .safetensors, .pt, .pth, .bin "
          "and .ckpt");
}

}  // namespace

Location location_of(const std::string& path, bool follow_links) {
  refuse_other_file(path);
  return follow_links ? Location(path).following_links() : Location(path);
}

namespace {

std::string hint_for(const Checkpoint& checkpoint, const std::string& key) {
  const std::string similar = similar_keys_hint(checkpoint.metadata(), key);
  return similar.empty() ? "`tilestone ls` lists the keys" : similar;
}

}  // namespace

void refuse_key(const Checkpoint& checkpoint, const std::string& key) {
  throw Error(ErrorCode::kInvalidArgument, "the checkpoint does not have this key")
      .with_key(key)
      .with_hint(hint_for(checkpoint, key));
}

void refuse_pattern(const Checkpoint& checkpoint, const std::vector<std::string>& patterns) {
  std::string text;
  for (const std::string& pattern : patterns)
    text += (text.empty() ? "\"" : ", \"") + pattern + "\"";
  throw Error(ErrorCode::kInvalidArgument, "no key matches " + text)
      .with_hint(hint_for(checkpoint, patterns.front()));
}

std::string rank_of_stock_file(const std::string& name) {
  const size_t begin = name.rfind("__");
  const size_t end = name.find('_', begin == std::string::npos ? begin : begin + 2);
  if (!name.ends_with(".distcp") || end == std::string::npos) return "no rank";
  const std::string rank = name.substr(begin + 2, end - begin - 2);
  const bool is_number = !rank.empty() && rank.find_first_not_of("0123456789") == std::string::npos;
  return is_number ? "rank " + rank : "no rank";
}

}  // namespace tilestone::cli
