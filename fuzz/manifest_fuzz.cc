// Takes any bytes as a manifest, and as a rank's receipt in it: as they are, and with corrected
// checksums.
#include <cstring>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/format/manifest.h"

namespace {

using tilestone::Bytes;
using tilestone::ByteView;

template <typename Parse>
void attempt(const Parse& parse) {
  try {
    parse();
  } catch (const tilestone::Error&) {
  }
}

Bytes sealed(ByteView bytes) {
  tilestone::ByteWriter out;
  out.raw(bytes);
  out.u64(tilestone::xxh3_64(bytes));
  return std::move(out).take();
}

// The bytes with a correct checksum of the head, whose size the bytes state.
Bytes with_sealed_head(ByteView bytes) {
  Bytes out(bytes.begin(), bytes.end());
  constexpr uint64_t kStart = 20, kSizeAt = 12, kSum = 8;
  if (bytes.size() < kStart + kSum) return out;
  uint64_t head = 0;
  std::memcpy(&head, bytes.data() + kSizeAt, sizeof head);
  if (head < kStart + kSum || head > bytes.size()) return out;
  const uint64_t sum = tilestone::xxh3_64(bytes.first(head - kSum));
  std::memcpy(out.data() + head - kSum, &sum, sizeof sum);
  return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const ByteView bytes(reinterpret_cast<const std::byte*>(data), size);
  for (const Bytes& input :
       {Bytes(bytes.begin(), bytes.end()), sealed(bytes), with_sealed_head(bytes)}) {
    attempt([&] { tilestone::Manifest::decode(input, "manifest"); });
  }
  attempt([&] { tilestone::Receipt::decode(bytes); });
  attempt([&] { tilestone::Receipt::decode(sealed(bytes)); });
  return 0;
}
