// Takes any bytes as a pickle: parses nodes, makes a value of them, prints the value.
#include "tilestone/base/error.h"
#include "tilestone/format/archive/torch_archive.h"
#include "tilestone/format/torch_dist/torch_dist.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const auto* bytes = reinterpret_cast<const std::byte*>(data);
    to_string(tilestone::read_pickle({bytes, size}));
  } catch (const tilestone::Error&) {
  }
  return 0;
}
