#include "tilestone/format/archive/torch_archive.h"

#include "tilestone/format/archive/archive_reader_internal.h"
#include "tilestone/format/archive/archive_writer_internal.h"
#include "tilestone/format/archive/pickle_reader_internal.h"
#include "tilestone/format/archive/value_check_internal.h"
#include "tilestone/format/archive/value_reader_internal.h"

namespace tilestone {

Value read_torch_archive(ByteView bytes) { return archive::read_archive(bytes); }

Value read_pickle(ByteView bytes) {
  using archive::Pickle;
  return archive::read_value(Pickle::parse(bytes, Pickle::Sizes::kCalls), {});
}

std::vector<std::string> classes_in(ByteView pickled, bool archive) {
  return archive::classes_in_pickle(pickled, archive);
}

Bytes write_torch_archive(const Value& value) { return archive::write_archive(value); }

}  // namespace tilestone
