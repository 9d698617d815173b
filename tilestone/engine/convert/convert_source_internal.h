// What a conversion reads: the tensors and objects of a checkpoint, or of one file of torch.save.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/engine/convert/convert.h"
#include "tilestone/engine/convert/stored_source_internal.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/state/metadata.h"
#include "tilestone/state/value.h"

namespace tilestone::engine {

// A tensor or an object; the other is null.
struct SourceEntry {
  const StoredTensor* tensor = nullptr;
  const StoredObject* object = nullptr;

  const std::string& key() const { return tensor != nullptr ? tensor->key : object->key; }
  // Empty if it is not recorded.
  const Path& path() const { return tensor != nullptr ? tensor->path : object->path; }
  // Its position among the leaves of the tree.
  uint32_t order() const { return tensor != nullptr ? tensor->order : object->order; }
};

struct ConvertSource {
  std::shared_ptr<StoredSource> stored;
  std::vector<SourceEntry> entries;  // by key: first the tensors, then the objects
  std::optional<Value> common;       // a dict

  std::string_view format() const { return stored->opened().format->name(); }
  std::string_view dialect() const { return stored->opened().dialect->name(); }
  const Metadata& metadata() const { return stored->metadata(); }
};

// A regular file whose name ends with .pt, .pth, .bin or .ckpt is read as a file of torch.save,
// whose checksums are checked now. Throws what Checkpoint::open throws.
ConvertSource open_source(const Location& location, const ConvertOptions& options);

// Error(kInvalidArgument) if one is inside the other: it would be taken for a part of it, and
// removed with it.
void expect_apart(const Location& source, const Location& target);

// As tilestone::convert(), which does no more than to call both of these first.
ConvertResult convert(ConvertSource source, const Location& target, const ConvertOptions& options);

}  // namespace tilestone::engine
