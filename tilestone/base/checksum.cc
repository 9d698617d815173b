#include "tilestone/base/checksum.h"

#include <fmt/format.h>
#include <isa-l/crc.h>
#include <xxhash.h>
#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>

#include "tilestone/base/error.h"

namespace tilestone {
namespace {

// The checksum of a block is computed first, which brings the block into the first-level cache for
// the copy. Measured: 1.1 times the speed of a plain memcpy. Copying first, or blocks of 64 KiB,
// gave 0.8 times.
constexpr size_t kCopyBlock = 4096;  // bytes

}  // namespace

uint32_t crc32(ByteView bytes, uint32_t seed) {
  return crc32_gzip_refl(seed, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
}

uint32_t crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t size_b) {
  if (size_b > uint64_t{std::numeric_limits<z_off64_t>::max()}) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("crc32_combine: {} bytes exceed 63 bits", size_b));
  }
  return static_cast<uint32_t>(::crc32_combine64(crc_a, crc_b, static_cast<z_off64_t>(size_b)));
}

uint32_t copy_crc32(MutableByteView target, ByteView source, uint32_t seed) {
  if (target.size() != source.size()) {
    throw Error(ErrorCode::kInternal, fmt::format("copy_crc32: target has {} bytes, source {}",
                                                  target.size(), source.size()));
  }
  for (size_t done = 0; done < source.size();) {
    const size_t size = std::min(kCopyBlock, source.size() - done);
    seed = crc32(source.subspan(done, size), seed);
    std::memcpy(target.data() + done, source.data() + done, size);
    done += size;
  }
  return seed;
}

uint64_t xxh3_64(ByteView bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

struct Hasher128::State {
  XXH3_state_t* xxh3 = XXH3_createState();
  ~State() { XXH3_freeState(xxh3); }
};

Hasher128::Hasher128() : state_(std::make_unique<State>()) {
  if (state_->xxh3 == nullptr || XXH3_128bits_reset(state_->xxh3) != XXH_OK) throw std::bad_alloc();
}
Hasher128::~Hasher128() = default;

void Hasher128::add(ByteView bytes) {
  XXH3_128bits_update(state_->xxh3, bytes.data(), bytes.size());
}

Hash128 Hasher128::value() const {
  const XXH128_hash_t hash = XXH3_128bits_digest(state_->xxh3);
  return {hash.low64, hash.high64};
}

}  // namespace tilestone
