// How RangeReader merges, orders and batches reads, and the checksums that it computes.
#include "tilestone/engine/read/range_reader_internal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <optional>
#include <random>
#include <tuple>
#include <utility>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/format/torch_dist/torch_dist.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::engine::range_reader_test {

using testing::ElementsAre;
using testing::IsEmpty;

constexpr uint64_t kBuffer = 256u << 10;
constexpr uint64_t kFileBytes = 1u << 20;
constexpr uint64_t kGap = ReadCosts().gap_bytes;
constexpr uint64_t kLong = 2 * ReadCosts().request_bytes;

struct Place {
  std::string file;
  uint64_t begin;
  uint64_t size;
  bool operator==(const Place&) const = default;
};

void PrintTo(const Place& place, std::ostream* out) {
  *out << place.file << " " << place.begin << " + " << place.size;
}

// Files "0", "1", ... of kFileBytes, in a storage that records its reads.
class Ranges : public testing::Test {
 protected:
  explicit Ranges(int files = 2, uint64_t bytes = kFileBytes) {
    FileImage image;
    for (int i = 0; i < files; ++i) {
      metadata_.files.push_back(std::to_string(i));
      image[metadata_.files.back()] = content(i, bytes);
    }
    disk_ = FaultDisk::create(memory_storage(std::move(image)), [this](const StorageCall& call) {
      const std::lock_guard lock(mutex_);
      if (call.op == StorageOp::kOpen) ++opens_;
      if (call.op != StorageOp::kRead) return FaultAction::pass();
      reads_.push_back({std::string(call.name), call.offset, call.size});
      return call.name == failing_ ? FaultAction::fail(EIO) : FaultAction::pass();
    });
    storage_ = disk_->storage();
    context_.emplace(ReadContext{*storage_, *format_, metadata_,
                                 BufferPool::create(8 * kBuffer, kBuffer), threads_});
  }

  static Bytes content(int file, uint64_t bytes = kFileBytes) {
    return pattern_bytes(bytes, static_cast<uint64_t>(file));
  }

  RangeReader reader() { return {*context_, &threads_}; }

  // The reads that the storage has got since the last call, by file and offset.
  std::vector<Place> reads() {
    std::vector<Place> reads = std::exchange(reads_, {});
    std::sort(reads.begin(), reads.end(), [](const Place& a, const Place& b) {
      return std::tie(a.file, a.begin) < std::tie(b.file, b.begin);
    });
    return reads;
  }

  Metadata metadata_;
  std::mutex mutex_;
  std::vector<Place> reads_;
  int opens_ = 0;
  std::string failing_ = "none";
  std::shared_ptr<FaultDisk> disk_;
  std::shared_ptr<Storage> storage_;
  const std::shared_ptr<const Format> format_ = torch_dist_format();
  ThreadPool threads_{2};
  std::optional<ReadContext> context_;
};

TEST_F(Ranges, NearOnesAreOneReadAndDistantOnesAreTwo) {
  RangeReader reader = this->reader();
  reader.add({.file = 0, .begin = 100, .size = 50});
  reader.add({.file = 0, .begin = 150 + kGap, .size = 10});
  reader.add({.file = 0, .begin = 160 + 2 * kGap + 1, .size = 10});
  reader.read();
  EXPECT_THAT(reads(), ElementsAre(Place{"0", 100, kGap + 60}, Place{"0", 161 + 2 * kGap, 10}));
}

TEST_F(Ranges, OfTwoFilesAreNotMerged) {
  RangeReader reader = this->reader();
  reader.add({.file = 0, .begin = 0, .size = 8});
  reader.add({.file = 1, .begin = 8, .size = 8});
  reader.read();
  EXPECT_THAT(reads(), ElementsAre(Place{"0", 0, 8}, Place{"1", 8, 8}));
}

TEST_F(Ranges, MayComeInAnyOrderAndShareBytes) {
  const Bytes expected = content(0);
  for (const uint64_t last : {1000u, 100u}) {  // ends after the others, or inside one of them
    RangeReader reader = this->reader();
    reader.add({.file = 0, .begin = 2000, .size = last});
    reader.add({.file = 0, .begin = 500, .size = 1000});
    reader.add({.file = 0, .begin = 0, .size = 2500});
    std::mutex mutex;
    std::vector<Bytes> found(3);
    reader.read([&](size_t number, ByteView bytes) {
      const std::lock_guard lock(mutex);
      found[number].assign(bytes.begin(), bytes.end());
    });
    EXPECT_THAT(reads(), ElementsAre(Place{"0", 0, std::max<uint64_t>(2500, 2000 + last)}));
    EXPECT_TRUE(same_bytes(found[0], ByteView(expected).subspan(2000, last)));
    EXPECT_TRUE(same_bytes(found[1], ByteView(expected).subspan(500, 1000)));
    EXPECT_TRUE(same_bytes(found[2], ByteView(expected).first(2500)));
  }
}

TEST_F(Ranges, TogetherNeverExceedAPooledBuffer) {
  RangeReader reader = this->reader();
  for (uint64_t i = 0; i < 8; ++i) {
    reader.add({.file = 0, .begin = i * kBuffer / 2, .size = kBuffer / 2});
  }
  reader.read();
  EXPECT_THAT(reads(),
              ElementsAre(Place{"0", 0, kBuffer}, Place{"0", kBuffer, kBuffer},
                          Place{"0", 2 * kBuffer, kBuffer}, Place{"0", 3 * kBuffer, kBuffer}));
}

TEST_F(Ranges, ThatAreLongGoStraightToTheirTargets) {
  Bytes target(kFileBytes);
  RangeReader reader = this->reader();
  reader.add({.file = 0, .begin = 0, .size = 1000, .target = target.data()});
  reader.add({.file = 0, .begin = 1000, .size = kLong, .target = target.data() + 1000});
  reader.add({.file = 0, .begin = 1000 + kLong, .size = 9, .target = target.data() + 1000 + kLong});
  reader.read([&](size_t number, ByteView bytes) {
    if (number == 1) {
      EXPECT_EQ(bytes.data(), target.data() + 1000);
    }
  });
  EXPECT_THAT(reads(), ElementsAre(Place{"0", 0, 1000}, Place{"0", 1000, kLong},
                                   Place{"0", 1000 + kLong, 9}));
  EXPECT_TRUE(
      same_bytes(ByteView(target).first(1009 + kLong), ByteView(content(0)).first(1009 + kLong)));
}

TEST_F(Ranges, MayBeLargerThanABufferWhereTheyHaveATarget) {
  Bytes target(kFileBytes);
  RangeReader reader = this->reader();
  reader.add({.file = 1, .begin = 0, .size = kFileBytes, .target = target.data()});
  reader.read();
  EXPECT_TRUE(same_bytes(target, content(1)));
}

TEST_F(Ranges, HaveTheirChecksumsHoweverTheyAreRead) {
  Bytes target(kFileBytes);
  RangeReader reader = this->reader();
  reader.add({.file = 0, .begin = 10, .size = 500, .summed = true});
  reader.add({.file = 0, .begin = 600, .size = 100, .target = target.data(), .summed = true});
  reader.add(
      {.file = 1, .begin = 5, .size = 3 * kBuffer, .target = target.data() + 100, .summed = true});
  reader.add({.file = 1, .begin = 0, .size = 0, .summed = true});
  const std::vector<ByteRange> ranges = reader.read();
  ASSERT_EQ(ranges.size(), 4u);
  for (const ByteRange& range : ranges) {
    const Bytes all = content(static_cast<int>(range.file));
    EXPECT_EQ(range.crc32, crc32(ByteView(all).subspan(range.begin, range.size)));
  }
}

TEST_F(Ranges, ThatFollowOneAnotherHaveAChecksumEach) {
  for (const uint64_t last : {100, 30, 170}) {
    RangeReader reader = this->reader();
    for (uint64_t begin : {300, 100, 200}) {
      reader.add({.file = 0, .begin = begin, .size = 100, .summed = true});
    }
    reader.add({.file = 0, .begin = 400, .size = last, .summed = true});
    const std::vector<ByteRange> ranges = reader.read();
    ASSERT_EQ(ranges.size(), 4u);
    for (const ByteRange& range : ranges) {
      EXPECT_EQ(range.crc32, crc32(ByteView(content(0)).subspan(range.begin, range.size)));
    }
  }
}

TEST_F(Ranges, AnEmptyBatchReadsNothing) {
  RangeReader reader = this->reader();
  EXPECT_THAT(reader.read(), IsEmpty());
  EXPECT_THAT(reads(), IsEmpty());
}

TEST_F(Ranges, OfOneKeyNameItInErrorsAndOfSeveralNone) {
  const std::string a = "a", b = "b";
  failing_ = "1";
  for (const bool several : {false, true}) {
    RangeReader reader = this->reader();
    reader.add({.file = 0, .begin = 0, .size = 1, .key = &b});
    reader.add({.file = 1, .begin = 0, .size = 1, .key = &a});
    if (several) reader.add({.file = 1, .begin = 9, .size = 1, .key = &b});
    try {
      reader.read();
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kIo);
      EXPECT_EQ(error.file(), "1");
      EXPECT_EQ(error.key(), several ? "" : "a");
    }
  }
}

TEST_F(Ranges, BeyondTheEndOfAFileAreAnError) {
  RangeReader reader = this->reader();
  reader.add({.file = 0, .begin = kFileBytes - 1, .size = 2});
  expect_error([&] { reader.read(); }, ErrorCode::kCorrupt, "0");
}

TEST_F(Ranges, OfAFileThatStaysWantedOpenItOnce) {
  RangeReader reader = this->reader();
  for (uint64_t batch = 0; batch < 3; ++batch) {
    reader.add({.file = 0, .begin = batch, .size = 1});
    reader.read();
  }
  EXPECT_EQ(opens_, 1);
}

class RangesOfManyFiles : public Ranges {
 protected:
  RangesOfManyFiles() : Ranges(static_cast<int>(RangeReader::max_files()) + 10, 8) {}
};

TEST_F(RangesOfManyFiles, AreReadInBatches) {
  RangeReader reader = this->reader();
  size_t batches = 0;
  for (uint32_t file = 0; file < metadata_.files.size(); ++file) {
    reader.add({.file = file, .begin = 7, .size = 1});
    if (!reader.full()) continue;
    EXPECT_EQ(reader.size(), RangeReader::max_files());
    reader.read();
    ++batches;
  }
  reader.read();
  EXPECT_EQ(batches, 1u);
  EXPECT_EQ(reads().size(), metadata_.files.size());
  EXPECT_EQ(opens_, static_cast<int>(metadata_.files.size()));
}

TEST(RecordSum, IsThatOfTheWholeInWhateverOrderTheRangesCome) {
  const Bytes record = pattern_bytes(1000);
  std::vector<std::pair<uint64_t, uint64_t>> ranges = {
      {0, 1}, {1, 99}, {100, 0}, {100, 400}, {500, 500}};
  std::mt19937_64 random(3);
  for (int trip = 0; trip < 50; ++trip) {
    std::shuffle(ranges.begin(), ranges.end(), random);
    RecordSum sum;
    for (const auto& [offset, size] : ranges) {
      sum.add(offset, size, crc32(ByteView(record).subspan(offset, size)));
    }
    EXPECT_EQ(sum.size(), record.size());
    EXPECT_EQ(sum.crc32(), crc32(record));
  }
}

TEST(RecordSum, EndsAtAHole) {
  const Bytes record = pattern_bytes(100);
  RecordSum sum;
  sum.add(0, 40, crc32(ByteView(record).first(40)));
  sum.add(50, 50, crc32(ByteView(record).last(50)));
  EXPECT_EQ(sum.size(), 40u);
  EXPECT_EQ(sum.crc32(), crc32(ByteView(record).first(40)));
}

TEST(CachePolicy, KeepsByDefaultWhatFitsIntoHalfOfTheMemory) {
  EXPECT_EQ(cache_policy({}, 500, 1, 1000), CachePolicy::kKeep);
  EXPECT_EQ(cache_policy({}, 501, 1, 1000), CachePolicy::kBypass);
  EXPECT_EQ(cache_policy({}, 125, 4, 1000), CachePolicy::kKeep);
  EXPECT_EQ(cache_policy({}, 126, 4, 1000), CachePolicy::kBypass);
  EXPECT_EQ(cache_policy(CachePolicy::kKeep, 501, 1, 1000), CachePolicy::kKeep);
  EXPECT_EQ(cache_policy(CachePolicy::kBypass, 1, 1, 1000), CachePolicy::kBypass);
}

}  // namespace tilestone::engine::range_reader_test
