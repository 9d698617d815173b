// Objects and the common state as the checkpoint's dialect has them.
#pragma once

#include <optional>

#include "tilestone/engine/open/opening_internal.h"
#include "tilestone/engine/read/reader_internal.h"
#include "tilestone/state/value.h"

namespace tilestone::engine {

// The object that an item (after decoding) holds.
Value parse_object(const Opened& opened, ByteView item);

// The checkpoint's common state, read where no file of the index holds it; nullopt in a dialect
// that has none. Error(kCorrupt) when it is damaged or missing.
std::optional<Value> read_common(const ReadContext& context, const Opened& opened);

}  // namespace tilestone::engine
