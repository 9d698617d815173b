// All formats and dialects, and which of them a directory holds.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/format.h"

namespace tilestone {

std::vector<std::shared_ptr<const Format>> known_formats();
std::vector<std::shared_ptr<const Dialect>> known_dialects();
// By name ("torch_dist", "pytorch"); Error(kUnsupported) that lists the known ones.
std::shared_ptr<const Format> format_named(std::string_view name);
std::shared_ptr<const Dialect> dialect_named(std::string_view name);
// The same, or one that only saves have ("megatron_shards").
std::shared_ptr<const Dialect> save_dialect_named(std::string_view name);

// What a directory holds, by its files' names and marks. Both null: no checkpoint of ours to read.
struct DetectedFormat {
  std::shared_ptr<const Format> format;
  std::shared_ptr<const Dialect> dialect;
};
// `names`: of all files of the directory, sorted. `read` returns a file's bytes and is called for
// `metadata.json` at most; what it throws comes out.
DetectedFormat detect_format(std::span<const std::string> names,
                             const std::function<Bytes(const std::string&)>& read);

}  // namespace tilestone
