// Byte ranges of data files, in as few and as large reads as pays: the only place that orders,
// merges and batches reads, and takes checksums of what was read.
//
// The ranges of a batch are read in the order of their places, whatever order they are added in.
// One joins the read before it where both fit a pooled buffer and the bytes between them cost less
// than a further read (ReadCosts::gap_bytes); it is copied to its target then. A range that is long
// enough to pay for a read of its own (twice ReadCosts::request_bytes), or has no near neighbour,
// is read straight into its target.
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

namespace tilestone::engine {

// Whether the disk can't give bytes that it should have (EIO).
bool is_unreadable(const Error& error);

struct ByteRange {
  uint32_t file = 0;  // index into Metadata::files
  uint64_t begin = 0;
  uint64_t size = 0;                 // bytes; without a target, a pooled buffer holds them
  std::byte* target = nullptr;       // where the bytes go as they are, `size` bytes; null: nowhere
  const std::string* key = nullptr;  // whose bytes they are, for errors; null: nobody's
  bool summed = false;               // whether crc32 is wanted
  uint32_t crc32 = 0;                // of the bytes, once they are read
};

class RangeReader {
 public:
  static constexpr size_t kMaxRanges = 16384;  // of a batch
  static constexpr size_t kMaxFiles = 128;     // of a batch; no more are open at once

  // Reads, and calls back, on `threads`; null: on the calling thread alone.
  RangeReader(const ReadContext& context, ThreadPool* threads);

  // Adds a range to the batch, as the number `size()`.
  void add(const ByteRange& range);
  size_t size() const { return ranges_.size(); }
  // The caller then reads the batch before it adds more.
  bool full() const { return ranges_.size() >= kMaxRanges || batch_files_.size() >= kMaxFiles; }

  // Called once for each range, in no particular order and from several threads at once, with its
  // number and its bytes (at its target, or in memory that is reused after the call).
  using Take = std::function<void(size_t number, ByteView bytes)>;

  // Called, one range after the other, for those that the disk can't read.
  using Unread = std::function<void(size_t number, const Error& error)>;

  // Reads the batch and returns its ranges as they were added, with their checksums; the next one
  // begins. The first failure, also of `take`, is thrown: it names the file, and the key where only
  // one can be meant. With `unread`, where is_unreadable, the ranges that are left are read one by
  // one, and each that can't be read is passed to `unread`: the others go on.
  std::vector<ByteRange> read(const Take& take = {}, const Unread& unread = {});
  // Brings the batch into the page cache instead (Storage::prefetch): targets and checksums are
  // ignored. Returns the bytes of reads that were not there. What the disk can't read is left: who
  // reads it then is told.
  uint64_t prefetch();

  // The file, which stays open until others are wanted. Error as of open_data.
  const ReadableFile& open(uint32_t file);

 private:
  // A read, for the ranges order_[first, first + count).
  struct Run {
    uint64_t begin = 0;
    uint64_t end = 0;
    size_t first = 0;
    size_t count = 0;
    bool straight = false;  // into the target of its only range
  };

  const ByteRange& at(size_t place) const { return ranges_[order_[place]]; }
  bool is_long(const ByteRange& range) const;
  std::vector<Run> merge();
  std::vector<ReadOp> reads_of(const std::vector<Run>& runs);
  void read_merged(const Take& take);
  std::vector<ByteRange> read_each(const Take& take, const Unread& unread);
  void take_range(const Run& run, size_t number, ByteView bytes, const Take& take);
  ReadOptions options() const;
  Error with_key_of(Error error) const;
  std::vector<ByteRange> finish();

  const ReadContext& context_;
  ThreadPool* const threads_;
  const ReadCosts costs_;
  std::vector<ByteRange> ranges_;
  std::vector<uint32_t> order_;  // of ranges_, by place
  std::vector<char> taken_;      // of ranges_: those that are read
  std::set<uint32_t> batch_files_;
  std::map<uint32_t, std::unique_ptr<ReadableFile>> files_;
};

// The CRC-32 of a record from those of its pieces, which may come in any order and may be missing.
class RecordSum {
 public:
  // No two pieces share bytes; `offset` is in the record.
  void add(uint64_t offset, uint64_t size, uint32_t crc32);
  // How many bytes, from the record's first on, have come without a hole; and their CRC-32.
  uint64_t size() const { return size_; }
  uint32_t crc32() const { return crc32_; }

 private:
  struct EarlyRange {
    uint64_t size;
    uint32_t crc32;
  };
  uint64_t size_ = 0;
  uint32_t crc32_ = 0;
  std::map<uint64_t, EarlyRange> early_;  // by offset: those before them have not come
};

}  // namespace tilestone::engine
