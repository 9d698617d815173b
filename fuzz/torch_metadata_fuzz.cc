// Takes any bytes as `.metadata`. Parsed metadata must be the same after writing and reading it
// again. Flattened tensors are only read: their boxes must be inside their shapes, and each item's
// chunks must follow one another.
#include <cstdlib>

#include "tilestone/base/error.h"
#include "tilestone/format/torch_dist/metadata_reader_internal.h"
#include "tilestone/format/torch_dist/metadata_writer_internal.h"

namespace {

bool has_flattened(const tilestone::Metadata& metadata) {
  bool found = false;
  for (const tilestone::StoredTensor& tensor : metadata.tensors) {
    int64_t next = 0;
    for (const tilestone::StoredChunk& chunk : tensor.chunks) {
      if (!chunk.flat) continue;
      found = true;
      tilestone::check_bounds(chunk.box, tensor.shape);
      if (chunk.flat->begin != next) abort();
      next += chunk.box.numel();
      if (next == chunk.flat->elements) next = 0;
    }
    if (next != 0) abort();
  }
  return found;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tilestone;
  Metadata metadata;
  try {
    metadata = torch_dist::parse_metadata({reinterpret_cast<const std::byte*>(data), size});
    metadata.index();
  } catch (const Error&) {
    return 0;
  }
  if (has_flattened(metadata)) return 0;
  const Bytes written = torch_dist::write_metadata(metadata);
  Metadata again = torch_dist::parse_metadata(written);
  again.index();
  if (torch_dist::write_metadata(again) != written) abort();
  return 0;
}
