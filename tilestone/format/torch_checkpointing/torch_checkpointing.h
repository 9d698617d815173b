// Folders that Meta's package torch_checkpointing writes: for each item of the state ("model") and
// each rank a file of torch.save, and a pickle that says how tensors are distributed.
// docs/formats/torch_checkpointing.md specifies them. All of it is read as data.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "tilestone/format/format.h"
#include "tilestone/state/value.h"

namespace tilestone {

// For reading. Its check() refuses every save: only a conversion writes such folders.
std::shared_ptr<const Format> torch_checkpointing_format();

inline constexpr std::string_view kTorchCheckpointingIndex = "metadata.pkl";

// Whether the package takes the name as that of an item: letters, digits, "_" and "-"; and files
// can have it.
bool is_torch_checkpointing_item(std::string_view name);

// The file of an item that rank 0 writes.
std::string torch_checkpointing_file(std::string_view item);

// What metadata.pkl says of items that one rank has saved, whole. `items`: a dict of them; of its
// tensors, only dtypes and shapes are used.
Value torch_checkpointing_index(const Value& items);

}  // namespace tilestone
