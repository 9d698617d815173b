// Checksums. Items have a CRC-32 (zip's polynomial), as in torch's own archives. Tilestone's own
// small files have an XXH3. ISA-L and xxHash compute them.
#pragma once

#include <cstdint>
#include <memory>

#include "tilestone/base/bytes.h"

namespace tilestone {

// CRC-32 of `bytes`, continued from `seed` (0 at the start). The same as zlib's crc32().
uint32_t crc32(ByteView bytes, uint32_t seed = 0);

// CRC-32 of A followed by B, computed from crc(A), crc(B) and B's length in bytes. The same as
// zlib's crc32_combine(). Error(kInvalidArgument) if size_b exceeds 63 bits.
uint32_t crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t size_b);

// Copies `source` to `target` (same size, no overlap) and returns the CRC-32 of the bytes,
// continued from `seed`. Reads memory once: each block is copied while it is in the first-level
// cache. If the source changes meanwhile, the checksum may match neither the source nor the target.
uint32_t copy_crc32(MutableByteView target, ByteView source, uint32_t seed = 0);

uint64_t xxh3_64(ByteView bytes);

// An XXH3 of 128 bits. Zero stands for none.
struct Hash128 {
  uint64_t low = 0;
  uint64_t high = 0;
  explicit operator bool() const { return low != 0 || high != 0; }
  friend bool operator==(const Hash128&, const Hash128&) = default;
};

// The hash of bytes that are passed to it in order.
class Hasher128 {
 public:
  Hasher128();
  ~Hasher128();
  Hasher128(const Hasher128&) = delete;
  Hasher128& operator=(const Hasher128&) = delete;
  void add(ByteView bytes);
  Hash128 value() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tilestone
