// Takes any bytes as an item: reads it as an object, and checks it.
#include "tilestone/base/error.h"
#include "tilestone/format/archive/torch_archive.h"
#include "tilestone/format/torch_dist/torch_dist.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const tilestone::ByteView item(reinterpret_cast<const std::byte*>(data), size);
  try {
    tilestone::torch_dist_format()->verify_object(item);
  } catch (const tilestone::Error& error) {
    if (error.code() != tilestone::ErrorCode::kUnsafe) throw;  // damage is returned, not thrown
  }
  try {
    to_string(tilestone::read_torch_archive(item));
  } catch (const tilestone::Error&) {
  }
  return 0;
}
