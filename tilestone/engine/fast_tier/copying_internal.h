// Copying data files from a host to the run's directory, compared with their checksums on the way.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/plan/receipt.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// The checksum of a range of a file: of an item, or of what is between items.
struct RangeSum {
  uint64_t offset = 0;  // bytes
  uint64_t length = 0;  // bytes
  uint32_t crc32 = 0;
  friend auto operator<=>(const RangeSum&, const RangeSum&) = default;
};
// By file; the ranges of a file are sorted.
std::map<std::string, std::vector<RangeSum>> range_sums(std::span<const Receipt> receipts);

// Keeps a rate by waiting. nullopt: as fast as it goes.
class Rate {
 public:
  explicit Rate(std::optional<uint64_t> bytes_per_second) : limit_(bytes_per_second) {}
  void count(uint64_t bytes, const Deadline& deadline);

 private:
  std::optional<uint64_t> limit_;
  std::optional<Deadline::Clock::time_point> began_;
  uint64_t bytes_ = 0;
};

// A new durable file; one of this name is removed before, because an earlier try has left it. Takes
// two buffers of 8 MiB. Error(kCorrupt) names the file if the bytes are not those that were saved.
void copy_file(Storage& from, Storage& to, const ReceiptFile& file, std::span<const RangeSum> sums,
               Rate& rate, const Deadline& deadline);

}  // namespace tilestone::engine
