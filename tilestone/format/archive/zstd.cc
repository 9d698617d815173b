#include <zstd.h>

#include <algorithm>
#include <memory>
#include <string>

#include "tilestone/base/error.h"
#include "tilestone/format/archive/zstd_internal.h"

namespace tilestone::archive {
namespace {

// Grows the buffer with the bytes that have been decompressed. The size in a frame header is not
// trusted.
void grow(Bytes& out, uint64_t filled, uint64_t max_size) {
  if (filled == max_size) {
    throw Error(ErrorCode::kCorrupt,
                "zstd stream: it decompresses to more than " + std::to_string(max_size) + " bytes");
  }
  const uint64_t step = std::max<uint64_t>(ZSTD_DStreamOutSize(), filled);
  out.resize(filled + std::min(step, max_size - filled));
}

}  // namespace

Bytes zstd_decompress(ByteView compressed, uint64_t max_size) {
  const std::unique_ptr<ZSTD_DCtx, size_t (*)(ZSTD_DCtx*)> context(ZSTD_createDCtx(),
                                                                   ZSTD_freeDCtx);
  if (context == nullptr) throw std::bad_alloc();
  Bytes out;
  ZSTD_inBuffer in{compressed.data(), compressed.size(), 0};
  uint64_t filled = 0;
  size_t state = 1;  // 0: a frame has just ended
  bool output_full = false;
  while (in.pos < in.size || output_full) {
    if (filled == out.size()) grow(out, filled, max_size);
    ZSTD_outBuffer room{out.data() + filled, out.size() - filled, 0};
    state = ZSTD_decompressStream(context.get(), &room, &in);
    if (ZSTD_isError(state) != 0) {
      throw Error(ErrorCode::kCorrupt, std::string("zstd stream: ") + ZSTD_getErrorName(state) +
                                           " (at byte " + std::to_string(in.pos) + ")");
    }
    filled += room.pos;
    output_full = state != 0 && room.pos == room.size;
  }
  if (state != 0) throw Error(ErrorCode::kCorrupt, "zstd stream: it ends inside a frame");
  out.resize(filled);
  return out;
}

void zstd_decompress_into(ByteView compressed, MutableByteView out) {
  const size_t size = ZSTD_decompress(out.data(), out.size(), compressed.data(), compressed.size());
  if (ZSTD_isError(size) != 0) {
    throw Error(ErrorCode::kCorrupt, std::string("zstd stream: ") + ZSTD_getErrorName(size));
  }
  if (size == out.size()) return;
  throw Error(ErrorCode::kCorrupt, "zstd stream: it has " + std::to_string(size) +
                                       " bytes, expected " + std::to_string(out.size()));
}

bool zstd_says_size(ByteView compressed, uint64_t size) {
  return ZSTD_getFrameContentSize(compressed.data(), compressed.size()) == size;
}

Bytes zstd_compress(ByteView bytes) {
  const std::unique_ptr<ZSTD_CCtx, size_t (*)(ZSTD_CCtx*)> context(ZSTD_createCCtx(),
                                                                   ZSTD_freeCCtx);
  if (context == nullptr) throw std::bad_alloc();
  // Huffman's code (ZSTD_lcm_huffman) without much looking for matches: of XORs of weights it makes
  // as little as level 1, in half the time. A zstd without this parameter takes level 1.
  constexpr int kFast = -100, kHuffman = 1;
  const size_t set = ZSTD_CCtx_setParameter(context.get(), ZSTD_c_experimentalParam5, kHuffman);
  ZSTD_CCtx_setParameter(context.get(), ZSTD_c_compressionLevel,
                         ZSTD_isError(set) != 0 ? 1 : kFast);
  Bytes out(ZSTD_compressBound(bytes.size()));
  const size_t size =
      ZSTD_compress2(context.get(), out.data(), out.size(), bytes.data(), bytes.size());
  if (ZSTD_isError(size) != 0) {
    throw Error(ErrorCode::kInternal, std::string("zstd: ") + ZSTD_getErrorName(size));
  }
  out.resize(size);
  return out;
}

}  // namespace tilestone::archive
