// Optional fields at the end of a record. A later version may add fields; a reader skips the fields
// that it does not know. A record without optional fields has no bytes for them, not even a count.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tilestone/base/bytes.h"

namespace tilestone {

using NamedField = std::pair<std::string, Bytes>;

// Appends the fields, whose names must ascend. Writes nothing if there are no fields.
void write_named_fields(ByteWriter& out, const std::vector<NamedField>& fields);
// Reads the fields up to the end of the record and calls take(name, value) for each, in order.
// Error(kCorrupt) if the names do not ascend or bytes are left over.
void read_named_fields(ByteReader& in, const std::function<void(std::string_view, ByteView)>& take);

}  // namespace tilestone
