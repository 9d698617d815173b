#include "tilestone/engine/fast_tier/copying_internal.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <tuple>
#include <utility>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/base/pause.h"
#include "tilestone/engine/write/earlier_step_internal.h"

namespace tilestone::engine {
namespace {

// The checksum of a range of a file: of an item, or of what is between items.
struct RangeSum {
  uint64_t offset = 0;  // bytes
  uint64_t length = 0;  // bytes
  uint32_t crc32 = 0;
};

// By file of the receipt.
std::vector<std::vector<RangeSum>> range_sums(const Receipt& receipt) {
  std::vector<std::vector<RangeSum>> sums(receipt.files.size());
  const auto add_items = [&](const auto& items) {
    for (const auto& item : items) {
      sums.at(item.at.file)
          .push_back({item.at.offset, item.at.length, item.at.checksums.item_crc32});
    }
  };
  add_items(receipt.chunks);
  add_items(receipt.copies);
  add_items(receipt.objects);
  add_items(receipt.object_copies);
  for (const auto& part : receipt.parts) {
    sums.at(part.file).push_back({part.offset, part.length, part.crc32});
  }
  for (auto& ranges : sums) std::ranges::sort(ranges, {}, &RangeSum::offset);
  return sums;
}

// Compares the ranges of a file that is read from its beginning to its end.
class RangeCheck {
 public:
  explicit RangeCheck(std::vector<RangeSum> sums) : sums_(std::move(sums)) {}

  void take(uint64_t at, ByteView bytes) {
    const uint64_t end = at + bytes.size();
    for (; next_ < sums_.size() && sums_[next_].offset < end; ++next_) {
      const auto& [offset, length, crc] = sums_[next_];
      if (offset < checked_) continue;  // two items share their bytes
      const uint64_t from = std::max(offset, at), to = std::min(offset + length, end);
      sum_ = crc32(bytes.subspan(from - at, to - from), sum_);
      if (offset + length > end) return;
      checked_ = offset + length;
      if (std::exchange(sum_, 0) == crc) continue;
      throw Error(ErrorCode::kCorrupt, "the bytes from " + std::to_string(offset) + " to " +
                                           std::to_string(checked_) +
                                           " are not those that were saved, by their checksum");
    }
  }

 private:
  const std::vector<RangeSum> sums_;
  size_t next_ = 0;
  uint64_t checked_ = 0;  // all ranges before
  uint32_t sum_ = 0;      // of the next range, as far as it was read
};

// Keeps a rate by waiting.
class Rate {
 public:
  explicit Rate(std::optional<uint64_t> bytes_per_second) : limit_(bytes_per_second) {}
  void count(uint64_t bytes, const Deadline& deadline) {
    if (!limit_) return;
    bytes_ += bytes;
    const std::chrono::duration<double> due(static_cast<double>(bytes_) /
                                            static_cast<double>(*limit_));
    pause(due - (Deadline::Clock::now() - began_), deadline);
  }

 private:
  const std::optional<uint64_t> limit_;
  const Deadline::Clock::time_point began_ = Deadline::Clock::now();
  uint64_t bytes_ = 0;
};

// The file of an earlier step that has the items of a file that steps share, by their hashes. It
// has been shared by fewer steps, so that as few share it here as do where the file was saved.
std::optional<uint32_t> same_file(const EarlierStep& earlier, const Receipt& receipt,
                                  uint32_t file) {
  std::optional<uint32_t> same;
  const auto all_are = [&](const std::vector<Receipt::Chunk>& chunks, bool copies) {
    return std::ranges::all_of(chunks, [&](const Receipt::Chunk& chunk) {
      const ReceiptItem& at = chunk.at;
      if (at.file != file) return true;
      const auto& tensor = receipt.tensors.at(chunk.tensor);
      const auto found =
          earlier.find(tensor.key, tensor.dtype, tensor.global_shape, chunk.box, copies);
      if (!found || !at.hash || found->at.hash != at.hash || found->at.offset != at.offset ||
          found->at.length != at.length ||
          found->at.checksums.item_crc32 != at.checksums.item_crc32 ||
          found->file != same.value_or(found->file)) {
        return false;
      }
      same = found->file;
      return true;
    });
  };
  if (!all_are(receipt.chunks, false) || !all_are(receipt.copies, true)) return std::nullopt;
  if (!same) return std::nullopt;
  const ReceiptFile &there = earlier.files()[*same], &wanted = receipt.files[file];
  return there.size == wanted.size && there.steps < wanted.steps ? same : std::nullopt;
}

// Copies a file from its beginning to its end.
void copy_file(StepCopy& step, const ReceiptFile& file, RangeCheck check, Rate& rate,
               BufferPool& buffers, const Deadline& deadline) {
  const std::string& name = step.scratch.empty() ? file.name : step.scratch;
  Storage& to = *step.to;
  if (to.stat(name)) to.remove(name);
  step.made.push_back(name);
  const auto target = to.create(name, file.size, deadline);
  for (uint64_t offset = 0; offset < file.size;) {
    Buffer buffer = buffers.acquire(deadline);
    buffer.set_size(std::min<uint64_t>(buffer.capacity(), file.size - offset));
    const size_t size = buffer.size();
    step.from(file.name, offset, buffer.space().first(size));
    check.take(offset, buffer.view());
    target->append(std::move(buffer));
    offset += size;
    if (deadline.expired()) throw Error(ErrorCode::kTimeout, "the deadline passed while copying");
    rate.count(size, deadline);
  }
  target->sync(deadline);
  target->close();
  if (!step.scratch.empty()) to.rename(step.scratch, file.name, true);
}

}  // namespace

ReadRange reading_of(std::shared_ptr<Storage> folder) {
  const auto files = std::make_shared<std::map<std::string, std::unique_ptr<ReadableFile>>>();
  return [folder = std::move(folder), files](const std::string& name, uint64_t offset,
                                             MutableByteView target) {
    auto& file = (*files)[name];
    if (file == nullptr) file = folder->open(name);
    const ReadOp op{file.get(), offset, target.size(), target.data()};
    if (!target.empty()) folder->read({&op, 1}, {}, [](size_t, ByteView) {});
  };
}

void StepCopy::run(const std::vector<Receipt>& receipts, const std::set<std::string>& names,
                   const Deadline& deadline) {
  Rate rate(bytes_per_second);
  const auto buffers = BufferPool::create(2 * BufferPool::kDefaultBuffer);
  for (const Receipt& receipt : receipts) {
    const auto is_shared = [&](const ReceiptFile& file) {
      return earlier != nullptr && file.steps > 1 && names.contains(file.name);
    };
    std::optional<EarlierStep> step;  // as the receipt's rank reads it
    if (std::ranges::any_of(receipt.files, is_shared)) {
      step = EarlierStep::read(*earlier, receipt.rank, deadline);
    }
    std::vector<std::vector<RangeSum>> sums = range_sums(receipt);
    for (uint32_t i = 0; i < receipt.files.size(); ++i) {
      const ReceiptFile& file = receipt.files[i];
      if (!names.contains(file.name)) continue;
      try {
        const auto same = step && is_shared(file) ? same_file(*step, receipt, i) : std::nullopt;
        if (same) {
          made.push_back(file.name);
          if (to->stat(file.name)) to->remove(file.name);
          if (step->link(*same, *to, file.name, deadline)) continue;
        }
        copy_file(*this, file, RangeCheck(std::move(sums[i])), rate, *buffers, deadline);
      } catch (Error& error) {
        if (error.file().empty()) error.with_file(file.name);
        throw;
      }
    }
  }
  to->settle("");
}

}  // namespace tilestone::engine
