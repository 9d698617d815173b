// Reads byte ranges of data files in few, large reads. This is the only place that orders, merges
// and batches reads, and that computes checksums of what was read.
//
// The ranges of a batch are read in the order of their offsets, whatever order they are added in. A
// range is merged with the read before it if both fit in one pooled buffer and the bytes between
// them cost less than another read (ReadCosts::gap_bytes). It is then copied to its target. A range
// that is long enough for a read of its own (twice ReadCosts::request_bytes), or that has no near
// neighbour, is read straight into its target.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/read/context_internal.h"
#include "tilestone/engine/run/resources_internal.h"

namespace tilestone::engine {

// Whether the disk failed to read bytes of a file (EIO).
bool is_unreadable(const Error& error);

struct ByteRange {
  uint32_t file = 0;  // index into Metadata::files
  uint64_t begin = 0;
  uint64_t size = 0;                 // bytes; without a target it must fit in a pooled buffer
  std::byte* target = nullptr;       // `size` bytes that receive the range; null: none
  const std::string* key = nullptr;  // the key of the bytes, for error messages; null: none
  bool summed = false;               // whether crc32 is wanted
  uint32_t crc32 = 0;                // of the bytes, after the read
  // If not null, what is wanted instead: the CRC-32 of each block_bytes bytes, after the read. The
  // last block may be shorter.
  uint32_t* block_crc32 = nullptr;
  uint64_t block_bytes = 0;
};

class RangeReader {
 public:
  static constexpr size_t kMaxRanges = 16384;  // in a batch
  static constexpr size_t kMaxFiles = 128;     // see max_files()

  // The most files in a batch; also the most that are open at once.
  static size_t max_files() { return files_at_once(kMaxFiles); }

  // Reads and calls back on `threads`; null: only on the calling thread.
  RangeReader(const ReadContext& context, ThreadPool* threads);

  // Adds a range to the batch. Its number is size() before the call.
  void add(const ByteRange& range);
  size_t size() const { return ranges_.size(); }
  // If full, the caller must read the batch before it adds more.
  bool full() const { return ranges_.size() >= kMaxRanges || batch_files_.size() >= max_files_; }

  // Called once for each range with its number and its bytes (at its target, or in memory that is
  // reused after the call). The order is arbitrary, and several threads may call at once.
  using OnRead = std::function<void(size_t number, ByteView bytes)>;

  // Called for each range that the disk can't read, one range at a time.
  using Unread = std::function<void(size_t number, const Error& error)>;

  // Reads the batch and starts a new one. Returns the ranges in the order in which they were added,
  // with their checksums. Throws the first failure, also one of `on_read`; it names the file, and
  // the key if only one is possible. With `unread`, after an error that is_unreadable(), the ranges
  // that are left are read one by one; those that can't be read are passed to `unread`, and the
  // others are read.
  std::vector<ByteRange> read(const OnRead& on_read = {}, const Unread& unread = {});
  // Brings the batch into the page cache instead (Storage::prefetch), and starts a new one. Targets
  // and checksums are ignored. Returns how many bytes were not in the page cache before. An
  // unreadable range is no error here: whoever reads it later gets the error.
  uint64_t prefetch();

  // Opens a file. It stays open until others need its place. Throws what open_data()
  // throws.
  const ReadableFile& open(uint32_t file);

 private:
  // One read, of the ranges order_[first, first + count).
  struct Run {
    uint64_t begin = 0;
    uint64_t end = 0;
    size_t first = 0;
    size_t count = 0;
    bool straight = false;  // into the target of its only range
    bool summed = false;    // as it is read, into sums_[first, first + count)
  };

  const ByteRange& at(size_t i) const { return ranges_[order_[i]]; }
  bool is_long(const ByteRange& range) const;
  bool can_be_summed(const Run& run) const;
  std::vector<Run> merge();
  std::vector<ReadOp> reads_of(const std::vector<Run>& runs);
  void read_merged(const OnRead& on_read);
  std::vector<ByteRange> read_each(const OnRead& on_read, const Unread& unread);
  static void sum_blocks(const ByteRange& range, ByteView bytes);
  void pass_range(const Run& run, size_t number, ByteView bytes, const OnRead& on_read);
  ReadOptions options() const;
  Error with_key_of(Error error) const;
  std::vector<ByteRange> finish();
  bool close_idle(uint32_t besides);

  const ReadContext& context_;
  ThreadPool* const threads_;
  const ReadCosts costs_;
  const size_t max_files_ = max_files();
  std::vector<ByteRange> ranges_;
  std::vector<uint32_t> order_;  // indices into ranges_, by file and offset
  std::vector<uint32_t> sums_;   // in the order of order_, of runs that are summed as they are read
  std::vector<char> taken_;      // for each of ranges_: whether it was read
  std::set<uint32_t> batch_files_;
  std::map<uint32_t, std::unique_ptr<ReadableFile>> files_;
};

// Computes the CRC-32 of a record from the CRC-32s of its ranges. They may come in any order, and
// some may be missing.
class RecordSum {
 public:
  // Adds a range. Ranges must not overlap. `offset` is in the record, in bytes.
  void add(uint64_t offset, uint64_t size, uint32_t crc32);
  // The number of bytes from the start of the record up to the first hole, and their CRC-32.
  uint64_t size() const { return size_; }
  uint32_t crc32() const { return crc32_; }

 private:
  struct EarlyRange {
    uint64_t size;
    uint32_t crc32;
  };
  uint64_t size_ = 0;
  uint32_t crc32_ = 0;
  std::map<uint64_t, EarlyRange> early_;  // ranges behind a hole, by offset
};

}  // namespace tilestone::engine
