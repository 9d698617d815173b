#include "tilestone/base/block_sums.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"

namespace tilestone {
namespace {

constexpr uint64_t kBlocks = 64;               // at most, below kMaxWritten * kBlocks bytes
constexpr uint64_t kMaxWritten = 4u << 20;     // bytes of a block
constexpr uint32_t kPolynomial = 0xedb88320u;  // of the CRC-32, highest power first
constexpr uint32_t kOne = uint32_t{1} << 31;   // the polynomial 1

// The product of two polynomials modulo the CRC-32's polynomial.
uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = (b & 1) != 0 ? (b >> 1) ^ kPolynomial : b >> 1;
  }
  return product;
}

}  // namespace

uint64_t block_count(uint64_t bytes, uint64_t block_bytes) {
  return bytes / block_bytes + (bytes % block_bytes != 0 ? 1 : 0);
}

uint64_t block_bytes_for(uint64_t payload_bytes) {
  const uint64_t share = std::min(payload_bytes / kBlocks, kMaxWritten);
  const uint64_t up = std::bit_ceil(share + (payload_bytes % kBlocks != 0 ? 1 : 0));
  return std::clamp(up, BlockSums::kLeastBlock, kMaxWritten);
}

// The CRC-32 of A followed by B is crc(A) * x^(8 |B|) + crc(B). The power is the same for all
// blocks but the last, so it is computed once.
uint32_t BlockSums::combined() const {
  if (crc32.empty()) return 0;
  if (crc32.size() != block_count(bytes, block_bytes)) {
    throw Error(ErrorCode::kInternal, "the number of a payload's blocks is wrong");
  }
  const uint32_t power = crc32_combine(kOne, 0, block_bytes);
  uint32_t crc = crc32.front();
  for (size_t i = 1; i + 1 < crc32.size(); ++i) crc = multiply(power, crc) ^ crc32[i];
  if (crc32.size() == 1) return crc;
  return crc32_combine(crc, crc32.back(), bytes - (crc32.size() - 1) * block_bytes);
}

BlockSummer::BlockSummer(uint64_t payload_bytes) {
  sums_.block_bytes = block_bytes_for(payload_bytes);
  sums_.crc32.reserve(block_count(payload_bytes, sums_.block_bytes));
}

void BlockSummer::advance(uint64_t bytes, uint32_t crc) {
  if (bytes > left()) throw Error(ErrorCode::kInternal, "a block's end was passed");
  sums_.bytes += bytes;
  filled_ += bytes;
  crc_ = crc;
  if (left() > 0) return;
  sums_.crc32.push_back(std::exchange(crc_, 0));
  filled_ = 0;
}

uint32_t BlockSummer::add(ByteView bytes) {
  uint32_t all = 0;
  while (!bytes.empty()) {
    const ByteView part = bytes.first(std::min<uint64_t>(bytes.size(), left()));
    const uint32_t crc = crc32(part);
    add_crc(part.size(), crc);
    all = crc32_combine(all, crc, part.size());
    bytes = bytes.subspan(part.size());
  }
  return all;
}

void BlockSummer::add_crc(uint64_t bytes, uint32_t crc) {
  advance(bytes, filled_ == 0 ? crc : crc32_combine(crc_, crc, bytes));
}

BlockSums BlockSummer::take() {
  if (filled_ > 0) sums_.crc32.push_back(crc_);
  filled_ = 0;
  return std::move(sums_);
}

}  // namespace tilestone
