// What a conversion reads: the tensors and objects of a checkpoint, or of one file of torch.save.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tilestone/engine/convert/convert.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/state/metadata.h"
#include "tilestone/state/tensor_view.h"
#include "tilestone/state/value.h"

namespace tilestone::engine {

struct SourceEntry {
  std::string key;
  Path path;  // empty if it is not recorded
  DType dtype = DType::kFloat32;
  Dims shape;
  // The elements in a dtype, readable piece by piece. Null: an object. Reads are fast in the order
  // of these calls. Throws Error(kUnsupported) if they can't be converted.
  std::function<TensorView(DType)> tensor;
  std::function<Value()> object;
  const StoredObject* stored = nullptr;  // the object in a checkpoint, if it is one there
  uint32_t order = 0;                    // its position among the leaves of the tree
};

struct ConvertSource {
  std::string format;
  std::string dialect;
  std::vector<SourceEntry> entries;  // by key: first the tensors, then the objects
  std::optional<Value> common;       // a dict
  TreeKeys dict_keys;
  std::map<std::string, std::string> attributes;
  std::map<std::string, Attributes, std::less<>> tensor_attributes;  // by key
};

// A regular file whose name ends with .pt, .pth, .bin or .ckpt is read as a file of torch.save,
// whose checksums are checked now. Throws what Checkpoint::open throws.
ConvertSource open_source(const Location& location, const ConvertOptions& options);

}  // namespace tilestone::engine
