// Optional fields at the end of a record: a later version adds some, and a reader skips those that
// it does not know. A record that has none ends before them.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tilestone/base/bytes.h"

namespace tilestone {

using NamedField = std::pair<std::string, Bytes>;

// Nothing where there are no fields. Their names ascend.
void write_named_fields(ByteWriter& out, const std::vector<NamedField>& fields);
// To the end of the record: take(name, value) for each, in order. Error(kCorrupt) unless the names
// ascend and nothing is left over.
void read_named_fields(ByteReader& in, const std::function<void(std::string_view, ByteView)>& take);

}  // namespace tilestone
