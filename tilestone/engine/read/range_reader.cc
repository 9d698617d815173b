#include "tilestone/engine/read/range_reader_internal.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <utility>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"

namespace tilestone::engine {
namespace {

// A shorter range is read into a pooled buffer: copying it costs less than reading it with direct
// I/O, which reads whole pages.
constexpr uint64_t kLeastStraight = 2u << 10;  // bytes

}  // namespace

RangeReader::RangeReader(const ReadContext& context, ThreadPool* threads)
    : context_(context), threads_(threads), costs_(context.storage.facts().read_costs) {}

void RangeReader::add(const ByteRange& range) {
  ranges_.push_back(range);
  batch_files_.insert(range.file);
}

bool RangeReader::is_long(const ByteRange& range) const {
  return range.target != nullptr && range.size >= 2 * costs_.request_bytes;
}

std::vector<RangeReader::Run> RangeReader::merge() {
  order_.resize(ranges_.size());
  std::iota(order_.begin(), order_.end(), 0);
  const auto before = [&](uint32_t a, uint32_t b) {
    return std::pair(ranges_[a].file, ranges_[a].begin) <
           std::pair(ranges_[b].file, ranges_[b].begin);
  };
  if (!std::is_sorted(order_.begin(), order_.end(), before)) {
    std::stable_sort(order_.begin(), order_.end(), before);
  }
  const uint64_t buffer = context_.buffers->buffer_bytes();
  std::vector<Run> runs;
  for (size_t i = 0; i < order_.size(); ++i) {
    const ByteRange& range = at(i);
    const uint64_t end = range.begin + range.size;
    Run* last = runs.empty() ? nullptr : &runs.back();
    const bool joins = last != nullptr && !last->straight && !is_long(range) &&
                       at(last->first).file == range.file &&
                       range.begin <= last->end + costs_.gap_bytes &&
                       std::max(end, last->end) - last->begin <= buffer;
    if (joins) {
      last->end = std::max(last->end, end);
      ++last->count;
    } else {
      runs.push_back({range.begin, end, i, 1, is_long(range)});
    }
  }
  for (Run& run : runs) {
    const ByteRange& range = at(run.first);
    run.straight |= run.count == 1 && range.target != nullptr && range.size >= kLeastStraight;
    run.summed = !run.straight && can_be_summed(run);
  }
  return runs;
}

// Whether the run's ranges can be summed while the run is read, as the blocks of one ReadOp: they
// follow one another, and all but the last are of one size. Afterwards, a buffer is larger than the
// processor's nearest caches.
bool RangeReader::can_be_summed(const Run& run) const {
  const uint64_t step = at(run.first).size;
  uint64_t next = run.begin;
  for (size_t i = run.first; i < run.first + run.count; ++i) {
    const ByteRange& range = at(i);
    const bool is_last = i + 1 == run.first + run.count;
    if (!range.summed || range.block_crc32 != nullptr || range.target != nullptr) return false;
    if (range.begin != next || range.size > step || (range.size < step && !is_last)) return false;
    next += range.size;
  }
  return step > 0;
}

std::vector<ReadOp> RangeReader::reads_of(const std::vector<Run>& runs) {
  std::vector<ReadOp> reads;
  reads.reserve(runs.size());
  sums_.resize(order_.size());
  for (const Run& run : runs) {
    ByteRange& first = ranges_[order_[run.first]];
    ReadOp read{nullptr, run.begin, run.end - run.begin, nullptr};
    try {
      read.file = &open(first.file);
    } catch (const Error& error) {
      throw first.key != nullptr ? Error(error).with_key(*first.key) : error;
    }
    if (run.straight) {
      read.target = first.target;
      if (first.summed) read.crc32 = &first.crc32;
      if (first.block_crc32 != nullptr) {
        read.crc32 = first.block_crc32;
        read.crc_bytes = first.block_bytes;
      }
    } else if (run.summed) {
      read.crc32 = &sums_[run.first];
      read.crc_bytes = first.size;
    }
    reads.push_back(read);
  }
  return reads;
}

const ReadableFile& RangeReader::open(uint32_t file) {
  std::unique_ptr<ReadableFile>& opened = files_[file];
  if (opened) return *opened;
  if (files_.size() > max_files_) close_idle(file);
  try {
    opened = open_data(context_, file);
  } catch (const Error& error) {
    if (error.sys_errno() != EMFILE || !close_idle(file)) throw;
    opened = open_data(context_, file);
  }
  return *opened;
}

// Closes the files that the batch does not need. False if there are none.
bool RangeReader::close_idle(uint32_t besides) {
  return std::erase_if(files_, [&](const auto& other) {
           return other.first != besides && !batch_files_.contains(other.first);
         }) > 0;
}

bool is_unreadable(const Error& error) {
  return error.code() == ErrorCode::kIo && error.sys_errno() == EIO && !error.cause();
}

std::vector<ByteRange> RangeReader::read(const OnRead& on_read, const Unread& unread) {
  taken_.assign(ranges_.size(), 0);
  try {
    read_merged(on_read);
  } catch (const Error& error) {
    if (!unread || !is_unreadable(error)) throw;
    return read_each(on_read, unread);
  }
  return finish();
}

std::vector<ByteRange> RangeReader::read_each(const OnRead& on_read, const Unread& unread) {
  const std::vector<char> taken = taken_;
  std::vector<ByteRange> all = finish();
  for (size_t i = 0; i < all.size(); ++i) {
    if (taken[i] != 0) continue;
    add(all[i]);
    taken_.assign(1, 0);
    try {
      read_merged([&](size_t, ByteView bytes) {
        if (on_read) on_read(i, bytes);
      });
      all[i].crc32 = finish().front().crc32;
    } catch (const Error& error) {
      if (!is_unreadable(error)) throw;
      finish();
      unread(i, error);
    }
  }
  return all;
}

void RangeReader::read_merged(const OnRead& on_read) {
  const std::vector<Run> runs = merge();
  const std::vector<ReadOp> reads = reads_of(runs);
  try {
    context_.storage.read(reads, options(), [&](size_t read, ByteView bytes) {
      const Run& run = runs[read];
      for (size_t i = run.first; i < run.first + run.count; ++i) {
        const ByteRange& range = at(i);
        if (run.summed) ranges_[order_[i]].crc32 = sums_[i];
        pass_range(run, order_[i], bytes.subspan(range.begin - run.begin, range.size), on_read);
      }
    });
  } catch (const Error& error) {
    throw with_key_of(error);
  }
}

// Sums the blocks, and copies them to the range's target.
void RangeReader::sum_blocks(const ByteRange& range, ByteView bytes) {
  for (uint64_t at = 0; at < bytes.size(); at += range.block_bytes) {
    const ByteView block = bytes.subspan(at, std::min(range.block_bytes, bytes.size() - at));
    uint32_t& crc = range.block_crc32[at / range.block_bytes];
    crc = range.target == nullptr ? crc32(block)
                                  : copy_crc32({range.target + at, block.size()}, block);
  }
}

void RangeReader::pass_range(const Run& run, size_t number, ByteView bytes, const OnRead& on_read) {
  ByteRange& range = ranges_[number];
  if (!run.straight && !run.summed) {
    if (range.block_crc32 != nullptr) {
      sum_blocks(range, bytes);
    } else if (range.target == nullptr) {
      if (range.summed) range.crc32 = crc32(bytes);
    } else if (range.summed) {
      range.crc32 = copy_crc32({range.target, bytes.size()}, bytes);
    } else if (!bytes.empty()) {
      std::memcpy(range.target, bytes.data(), bytes.size());
    }
  }
  if (on_read) on_read(number, bytes);
  taken_[number] = 1;
}

uint64_t RangeReader::prefetch() {
  uint64_t fetched = 0;
  try {
    fetched = context_.storage.prefetch(reads_of(merge()), options());
  } catch (const Error& error) {
    if (!is_unreadable(error)) throw with_key_of(error);
  }
  finish();
  return fetched;
}

ReadOptions RangeReader::options() const {
  return {threads_, context_.buffers, context_.deadline, context_.cache};
}

// Adds the key to the error if all ranges that it can concern have the same key.
Error RangeReader::with_key_of(Error error) const {
  std::set<std::string> keys;
  for (const ByteRange& range : ranges_) {
    const bool meant = error.file().empty() || error.file() == context_.metadata.files[range.file];
    if (meant && range.key != nullptr) keys.insert(*range.key);
  }
  if (keys.size() == 1) error.with_key(*keys.begin());
  return error;
}

std::vector<ByteRange> RangeReader::finish() {
  order_.clear();
  batch_files_.clear();
  return std::exchange(ranges_, {});
}

void RecordSum::add(uint64_t offset, uint64_t size, uint32_t crc32) {
  if (size == 0) return;
  if (offset != size_) {
    early_.insert({offset, {size, crc32}});
    return;
  }
  crc32_ = crc32_combine(crc32_, crc32, size);
  size_ += size;
  for (auto next = early_.find(size_); next != early_.end(); next = early_.find(size_)) {
    crc32_ = crc32_combine(crc32_, next->second.crc32, next->second.size);
    size_ += next->second.size;
    early_.erase(next);
  }
}

}  // namespace tilestone::engine
