#include <algorithm>
#include <chrono>
#include <utility>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/base/pause.h"
#include "tilestone/engine/fast_tier/copying_internal.h"

namespace tilestone::engine {
namespace {

// Compares the ranges of a file that is read from its beginning to its end.
class RangeCheck {
 public:
  RangeCheck(std::span<const RangeSum> sums, const std::string& file) : sums_(sums), file_(file) {}

  void take(ByteView bytes) {
    for (uint64_t left = bytes.size(); left > 0;) {
      if (next_ == sums_.size()) return;
      const RangeSum& range = sums_[next_];
      if (at_ < range.offset) {
        const uint64_t skipped = std::min(left, range.offset - at_);
        left = advance(left, skipped);
        continue;
      }
      const uint64_t done = at_ - range.offset;
      const uint64_t taken = std::min(left, range.length - done);
      sum_ = crc32(bytes.subspan(bytes.size() - left, taken), sum_);
      left = advance(left, taken);
      if (done + taken == range.length) end(range);
    }
  }

 private:
  uint64_t advance(uint64_t left, uint64_t bytes) {
    at_ += bytes;
    return left - bytes;
  }

  void end(const RangeSum& range) {
    if (std::exchange(sum_, 0) != range.crc32) {
      throw Error(ErrorCode::kCorrupt, "the bytes from " + std::to_string(range.offset) + " to " +
                                           std::to_string(range.offset + range.length) +
                                           " are not those that were saved, by their checksum")
          .with_file(file_);
    }
    while (next_ < sums_.size() && sums_[next_].offset < at_) ++next_;
  }

  const std::span<const RangeSum> sums_;
  const std::string& file_;
  size_t next_ = 0;
  uint64_t at_ = 0;
  uint32_t sum_ = 0;
};

}  // namespace

std::map<std::string, std::vector<RangeSum>> range_sums(std::span<const Receipt> receipts) {
  std::map<std::string, std::vector<RangeSum>> sums;
  for (const Receipt& receipt : receipts) {
    const auto add = [&](uint32_t file, uint64_t offset, uint64_t length, uint32_t crc) {
      if (length > 0) sums[receipt.files.at(file).name].push_back({offset, length, crc});
    };
    const auto add_items = [&](const auto& items) {
      for (const auto& item : items) {
        const ReceiptItem& at = item.at;
        add(at.file, at.offset, at.length, at.checksums.item_crc32);
      }
    };
    add_items(receipt.chunks);
    add_items(receipt.copies);
    add_items(receipt.objects);
    add_items(receipt.object_copies);
    for (const auto& part : receipt.parts) add(part.file, part.offset, part.length, part.crc32);
  }
  for (auto& [name, ranges] : sums) std::ranges::sort(ranges);
  return sums;
}

void Rate::count(uint64_t bytes, const Deadline& deadline) {
  if (!limit_) return;
  const auto now = Deadline::Clock::now();
  if (!began_) began_ = now;
  bytes_ += bytes;
  const std::chrono::duration<double> due(static_cast<double>(bytes_) /
                                          static_cast<double>(*limit_));
  pause(due - (now - *began_), deadline);
}

void copy_file(Storage& from, Storage& to, const ReceiptFile& file, std::span<const RangeSum> sums,
               Rate& rate, const Deadline& deadline) {
  const auto source = from.open(file.name);
  if (to.stat(file.name)) to.remove(file.name);
  const auto target = to.create(file.name, file.size, deadline);
  const auto buffers = BufferPool::create(2 * BufferPool::kDefaultBuffer);
  RangeCheck check(sums, file.name);
  for (uint64_t offset = 0; offset < file.size;) {
    Buffer buffer = buffers->acquire(deadline);
    const uint64_t size = std::min<uint64_t>(buffer.capacity(), file.size - offset);
    const ReadOp op{source.get(), offset, size, buffer.data()};
    from.read({&op, 1}, {.deadline = deadline}, [](size_t, ByteView) {});
    buffer.set_size(size);
    check.take(buffer.view());
    target->append(std::move(buffer));
    offset += size;
    if (deadline.expired()) throw Error(ErrorCode::kTimeout, "the deadline passed while copying");
    rate.count(size, deadline);
  }
  target->sync(deadline);
  target->close();
}

}  // namespace tilestone::engine
