// Any bytes as a manifest: as they are, and with the checksum made right.
#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/format/manifest.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const tilestone::ByteView bytes(reinterpret_cast<const std::byte*>(data), size);
  tilestone::ByteWriter sealed;
  sealed.raw(bytes);
  sealed.u64(tilestone::xxh3_64(bytes));
  for (const tilestone::ByteView input : {bytes, tilestone::ByteView(sealed.bytes())}) {
    try {
      tilestone::Manifest::decode(input, "manifest");
    } catch (const tilestone::Error&) {
    }
  }
  return 0;
}
