// All formats and dialects, and the detection of those that a directory holds.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/base/bytes.h"

namespace tilestone {

class Dialect;
class Format;

// The formats that saves write.
std::vector<std::shared_ptr<const Format>> known_formats();
// These, and those that are only opened and converted (safetensors). A save neither makes nor
// replaces checkpoints of the latter: files that look like one may be anything.
std::vector<std::shared_ptr<const Format>> readable_formats();
std::vector<std::shared_ptr<const Dialect>> known_dialects();
// Look up by name ("torch_dist", "pytorch"), formats among the readable ones. Error(kUnsupported),
// listing the known names, if there is none of that name.
std::shared_ptr<const Format> format_named(std::string_view name);
std::shared_ptr<const Dialect> dialect_named(std::string_view name);
// Also finds the dialect that is for saves only ("megatron_shards").
std::shared_ptr<const Dialect> save_dialect_named(std::string_view name);

using FilesRead = std::map<std::string, Bytes>;  // by name

// Format and dialect of the checkpoint in a directory. Both null: there is no checkpoint of these
// formats.
struct DetectedFormat {
  std::shared_ptr<const Format> format;
  std::shared_ptr<const Dialect> dialect;
  FilesRead read = {};  // to find out, if the caller has kept them
};
// `names`: the names of all files in the directory, sorted. `read` returns a file's bytes; it is
// called only for `metadata.json`, and its exceptions are passed on.
DetectedFormat detect_format(std::span<const std::string> names,
                             const std::function<Bytes(const std::string&)>& read);
// The same among the readable formats. Known formats take precedence.
DetectedFormat detect_readable(std::span<const std::string> names,
                               const std::function<Bytes(const std::string&)>& read);

}  // namespace tilestone
