// Takes any bytes as a .zarray file. Parsed content must be the same after writing and reading it
// again.
#include <cstdlib>

#include "tilestone/base/error.h"
#include "tilestone/format/zarr/array_metadata_internal.h"
#include "tilestone/format/zarr/dtype_names_internal.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tilestone::zarr;
  const tilestone::ByteView text(reinterpret_cast<const std::byte*>(data), size);
  ArrayMetadata array;
  try {
    array = parse_array(text, "w/.zarray");
  } catch (const tilestone::Error&) {
    return 0;
  }
  if (array.chunk_bytes() == 0 || array.chunk_strides().size() != array.shape.size()) abort();
  if (name_of(array.dtype) && parse_array(write_array(array), "w/.zarray") != array) abort();
  return 0;
}
