// The form of small files in `.tilestone`: the byte of a version, the content, and the XXH3 of
// everything before it, as a little-endian u64.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "tilestone/base/bytes.h"
#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"

namespace tilestone::engine {

// `out`: what begins with the version.
inline Bytes sealed(ByteWriter out) {
  const uint64_t sum = xxh3_64(out.bytes());
  out.u64(sum);
  return std::move(out).take();
}

// What `read` returns of a reader of the content. Error(kCorrupt) for other bytes, kUnsupported for
// another version; errors name the file.
template <typename Read>
auto unsealed(ByteView bytes, const std::string& file, uint8_t version, const Read& read) {
  constexpr uint64_t kTrailerSize = sizeof(uint64_t);
  try {
    ByteReader whole(bytes, file);
    if (bytes.size() < kTrailerSize) whole.fail("too short");
    const ByteView body = whole.raw(bytes.size() - kTrailerSize);
    if (whole.u64() != xxh3_64(body)) whole.fail("the checksum differs");
    ByteReader in(body, file);
    if (in.u8() != version) {
      throw Error(ErrorCode::kUnsupported, file + " was written by another version of Tilestone");
    }
    auto result = read(in);
    in.expect_end();
    return result;
  } catch (Error& error) {
    error.with_file(file);
    throw;
  }
}

}  // namespace tilestone::engine
