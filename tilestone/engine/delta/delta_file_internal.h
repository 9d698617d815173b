// The safetensors files of a delta: writing what was encoded, and reading it again.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/base/error.h"
#include "tilestone/base/thread_pool.h"
#include "tilestone/engine/delta/delta.h"
#include "tilestone/engine/delta/encoding_internal.h"
#include "tilestone/engine/delta/sums_internal.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/format/safetensors/delta_index.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// The file with the index, in the folder of a delta of several ranks.
inline constexpr std::string_view kDeltaName = "delta.safetensors";

// What is known from the index; `bytes` and `seconds` are not set.
DeltaReport report_of(const DeltaIndex& index);

// What `work` returns, with the time that it has taken.
template <typename Work>
DeltaReport timed(const Work& work) {
  const auto began = std::chrono::steady_clock::now();
  try {
    DeltaReport report = work();
    report.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    return report;
  } catch (...) {
    rethrow_cause();
  }
}

// What a file of a delta holds after its header. The entries are ordered by the size of their
// elements, as the safetensors package does, so that each is aligned.
class DeltaBody {
 public:
  // `spool`: a directory to which what is added goes. Null: nothing is copied, and what is added
  // must stay until it is written. `file`: of the pieces.
  DeltaBody(std::shared_ptr<Storage> spool, std::string file)
      : spool_(std::move(spool)), file_(std::move(file)) {}

  // Adds a piece, here and to the sum; `now` is needed for kWhole.
  void add(ShardSum& sum, const Box& box, const EncodedPiece& encoded, ByteView now);
  DeltaEntries entries() const;
  uint64_t bytes() const;
  // Writes the file, durably, with this header before the entries. Once.
  void write(Storage& storage, const std::string& name, const Bytes& header,
             const Deadline& deadline);

 private:
  struct Part {
    DeltaEntries entries;
    uint64_t bytes = 0;
    std::vector<ByteView> views;
    std::unique_ptr<WritableFile> spooled;
  };
  void put(const std::string& key, DType dtype, const Dims& shape, ByteView bytes);

  const std::shared_ptr<Storage> spool_;
  const std::string file_;
  std::map<uint64_t, Part, std::greater<>> parts_;  // by the size of their elements
};

// A delta that is opened for reading. Thread-safe.
class DeltaFile {
 public:
  // A safetensors file, or a folder with kDeltaName. Throws Error(kNotFound) if there is neither,
  // kCorrupt, and kUnsupported if it is an ordinary safetensors file.
  static DeltaFile open(const Location& location, const Deadline& deadline = Deadline::never());

  const DeltaIndex& index() const { return index_; }
  // In that version; null: not there.
  const DeltaTensor* in_base(const std::string& key) const;
  const DeltaTensor* in_result(const std::string& key) const;
  uint64_t bytes() const { return bytes_; }  // of all its files
  std::string describe() const { return place_; }
  Storage& folder() const { return *storage_; }  // of its files

  // Makes `elements`, those of `box` in C order, which are the base's, those of the new version.
  // Only the pieces that have a part of the box are read. Throws Error(kCorrupt) if they are
  // damaged; elements may have been changed then.
  void apply(const DeltaTensor& tensor, const Box& box, MutableByteView elements) const;
  // Reads the pieces for which `wanted` is true, or all, and checks them as far as this is possible
  // without the base. If they are at most `keep` bytes, and kMaxKept, they stay in memory for
  // apply(): so many are returned.
  static constexpr uint64_t kMaxKept = 32u << 20;
  using Wanted = std::function<bool(const DeltaTensor& tensor, const Box& box)>;
  uint64_t verify(ThreadPool& threads, uint64_t keep, const Wanted& wanted = nullptr);

 private:
  // Where the entries of a piece are, and their bytes while they are in memory.
  struct Entries {
    const DeltaTensor* tensor = nullptr;
    const DeltaPiece* piece = nullptr;
    const ReadableFile* file = nullptr;
    struct Entry {
      uint64_t begin = 0, end = 0;  // in the file
      ByteView bytes = {};
    } positions = {}, values = {};
    uint64_t size() const { return positions.end - positions.begin + values.end - values.begin; }
  };
  using Headers = std::map<std::string, DeltaHeader, std::less<>>;  // by DeltaPiece::file

  DeltaFile() = default;
  const DeltaTensor* find(const std::string& key, std::optional<uint32_t> DeltaTensor::* in) const;
  DeltaHeader& open_file(const std::string& name, const std::string& as, Headers& headers);
  Entries entries_of(const DeltaTensor& tensor, const DeltaPiece& piece,
                     const DeltaHeader& header) const;
  // Reads entries that are not in memory, and returns their memory.
  std::vector<Bytes> read(std::span<Entries> entries, ThreadPool* threads) const;
  void check_crc(const Entries& entries) const;
  void apply(const Entries& entries, const Box& box, MutableByteView elements) const;

  std::shared_ptr<Storage> storage_;
  std::string place_;
  Deadline deadline_ = Deadline::never();
  uint64_t bytes_ = 0;
  std::map<std::string, std::unique_ptr<ReadableFile>, std::less<>> files_;  // likewise
  DeltaIndex index_;
  std::map<const DeltaPiece*, Entries> entries_;
  std::vector<Bytes> kept_;
};

}  // namespace tilestone::engine
