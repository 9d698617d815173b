#include "tilestone/base/named_fields.h"

namespace tilestone {

void write_named_fields(ByteWriter& out, const std::vector<NamedField>& fields) {
  if (fields.empty()) return;
  out.varint(fields.size());
  for (const auto& [name, value] : fields) {
    out.string(name);
    out.blob(value);
  }
}

void read_named_fields(ByteReader& in,
                       const std::function<void(std::string_view, ByteView)>& take) {
  if (in.remaining() == 0) return;
  const uint64_t count = in.count(2);
  if (count == 0) in.fail("a record without optional fields must not have a count of them");
  std::string_view previous;
  for (uint64_t i = 0; i < count; ++i) {
    const std::string_view name = in.string();
    if (i > 0 && name <= previous) {
      in.fail("the names of the optional fields are not in ascending order");
    }
    take(name, in.blob());
    previous = name;
  }
  in.expect_end();
}

}  // namespace tilestone
