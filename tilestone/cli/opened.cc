#include "tilestone/cli/opened.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "tilestone/base/error.h"
#include "tilestone/cli/output.h"

namespace tilestone::cli {

bool is_file_opened(const std::string& path) {
  static constexpr const char* kKinds[] = {".safetensors", ".pt", ".pth", ".bin", ".ckpt"};
  return std::any_of(std::begin(kKinds), std::end(kKinds),
                     [&](const char* kind) { return path.ends_with(kind); });
}

namespace {

// A file of another kind, a pipe or a device would be taken for a directory, which can't be listed.
void refuse_other_file(const std::string& path) {
  std::error_code none;
  const std::filesystem::file_status status = std::filesystem::status(path, none);
  const bool is_file = is_regular_file(status);
  if (!exists(status) || is_directory(status) || (is_file && is_file_opened(path))) return;
  throw Error(ErrorCode::kNotFound, "no checkpoint at " + path + ": it is " +
                                        (is_file ? "a file" : "neither a file nor a directory"))
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
  std::string hint = similar_keys_hint(checkpoint.metadata(), key);
  if (hint.empty()) hint = "`tilestone ls` lists the keys";
  return checkpoint.has_common() ? hint + ", `tilestone cat --common` prints the common state"
                                 : hint;
}

}  // namespace

void refuse_key(const Checkpoint& checkpoint, const std::string& key) {
  throw Error(ErrorCode::kInvalidArgument, "the checkpoint does not have this key")
      .with_key(key)
      .with_hint(hint_for(checkpoint, key));
}

std::string key_named(const Checkpoint& checkpoint, const std::string& given) {
  const Metadata& metadata = checkpoint.metadata();
  const bool is_key =
      metadata.find_tensor(given) != nullptr || metadata.find_object(given) != nullptr;
  if (is_key || given.find('\\') == std::string::npos) return given;
  for (const std::string& key : checkpoint.keys()) {
    if (printable(key) == given) return key;
  }
  return given;
}

std::vector<std::string> unmatched_patterns(const Checkpoint& checkpoint,
                                            const std::vector<std::string>& patterns) {
  if (patterns.empty()) return {};
  const std::vector<std::string> keys = checkpoint.keys();
  std::vector<std::string> unmatched = patterns;
  std::erase_if(unmatched, [&](const std::string& pattern) {
    return std::any_of(keys.begin(), keys.end(),
                       [&](const std::string& key) { return matches({pattern}, key); });
  });
  return unmatched;
}

void print_notes(const std::vector<std::string>& notes) {
  for (const std::string& note : notes) fmt::print("note: {}\n", printable(note));
}

void print_about_common(const Checkpoint& checkpoint) {
  if (!checkpoint.has_common()) return;
  fmt::print("besides, a common state, which has no key: `tilestone cat --common` prints it\n");
}

void refuse_patterns(const Checkpoint& checkpoint, const std::vector<std::string>& patterns) {
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
