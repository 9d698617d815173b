// Any bytes as `.metadata`; what is read can be written, and reads back the same.
#include <cstdlib>

#include "tilestone/base/error.h"
#include "tilestone/format/torch_dist/metadata_reader_internal.h"
#include "tilestone/format/torch_dist/metadata_writer_internal.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tilestone;
  Metadata metadata;
  try {
    metadata = torch_dist::parse_metadata({reinterpret_cast<const std::byte*>(data), size});
    metadata.index();
  } catch (const Error&) {
    return 0;
  }
  const Bytes written = torch_dist::write_metadata(metadata);
  Metadata again = torch_dist::parse_metadata(written);
  again.index();
  if (torch_dist::write_metadata(again) != written) abort();
  return 0;
}
