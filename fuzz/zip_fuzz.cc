// Takes any bytes as a zip archive: the bytes of every record must be inside the archive.
#include <cstdlib>

#include "tilestone/base/error.h"
#include "tilestone/format/archive/zip_reader_internal.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tilestone::archive;
  const ItemBytes item(tilestone::ByteView(reinterpret_cast<const std::byte*>(data), size));
  try {
    const auto directory = ZipDirectory::parse(item);
    for (const ZipRecord& record : directory->records()) {
      const auto offset = directory->data_offset(item, record);
      if (!offset || !item.find(*offset, record.size)) abort();
    }
  } catch (const tilestone::Error&) {
  }
  return 0;
}
