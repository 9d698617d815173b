// Put before ISA-L with LD_PRELOAD: its CRC-32 without the work. What a save is then quicker by is
// what its checksums cost. The checkpoint's checksums are wrong.
#include <cstdint>

extern "C" uint32_t crc32_gzip_refl(uint32_t seed, const unsigned char* /*bytes*/,
                                    uint64_t /*size*/) {
  return seed;
}
