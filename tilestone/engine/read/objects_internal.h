// Reading objects and the common state, as the checkpoint's dialect stores them.
#pragma once

#include <optional>

#include "tilestone/engine/open/opening_internal.h"
#include "tilestone/engine/read/reader_internal.h"
#include "tilestone/state/value.h"

namespace tilestone::engine {

// The object in an item's decoded bytes, which its tensors share unless they are borrowed.
Value parse_object(const Opened& opened, const SharedBytes& item);

// Reads an object. Errors name its key and its file.
Value read_object(const ReadContext& context, const Opened& opened, const StoredObject& object);

// The checkpoint's common state: from the index if a file of the index holds it, else read as an
// object. nullopt in a dialect without common state. Error(kCorrupt) when it is damaged or missing.
// `leave_out`: it is not read, and an empty dict.
std::optional<Value> read_common(const ReadContext& context, const Opened& opened,
                                 bool leave_out = false);

}  // namespace tilestone::engine
