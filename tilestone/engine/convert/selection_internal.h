// Which tensors, objects and empty dicts of its source a conversion takes, and under which keys.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/base/dtype.h"
#include "tilestone/engine/convert/convert.h"
#include "tilestone/engine/convert/convert_source_internal.h"
#include "tilestone/state/items.h"
#include "tilestone/state/value.h"

namespace tilestone::engine {

inline constexpr std::string_view kMegatron = "megatron";

// A tensor or object of the source that goes into the new checkpoint.
struct Chosen {
  std::string from;
  std::string to;
  Path path;  // in the new tree; empty: at the top under its key
  const SourceEntry* entry = nullptr;
  DType dtype = DType::kFloat32;  // of a tensor, as it is written

  bool is_tensor() const { return entry->tensor != nullptr; }
};

struct Selection {
  std::vector<Chosen> chosen;            // sorted by `to`
  std::vector<std::string> empty_dicts;  // dotted paths of the source
  TreeKeys dict_keys;
  std::optional<Value> common;  // a dict
  uint64_t left_out = 0;        // keys of the source

  bool has_common() const { return common && !common->as_dict().empty(); }
};

// By `keys`, `only`, `rename`, `rename_by` and `cast` of the options. Borrows the source. Throws
// what convert() says of them.
Selection select(const ConvertSource& source, const ConvertOptions& options);

}  // namespace tilestone::engine
