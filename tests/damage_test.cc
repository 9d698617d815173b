// Truncates, extends, zeroes, swaps and removes files of a checkpoint. For each damage, either
// verify finds it, or it is harmless, which means that everything loads bit for bit. In any case a
// load either throws or returns the right data. Stock PyTorch's checkpoints have no checksum that
// ties an item to its place, so some damages of them can't be found; these are counted and printed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>

#include "tests/golden.h"
#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/storage/memory_storage_testing.h"

namespace tilestone::damage_test {

constexpr size_t kStep = TILESTONE_DAMAGE_STEP;  // 1, more under sanitizers
constexpr int kAppended = 64;                    // bytes at most
constexpr int kAppendedStep = kStep == 1 ? 1 : 9;

OpenOptions small_options() {
  OpenOptions options;
  options.resources.threads = 1;
  options.resources.buffer_bytes = 1u << 20;
  return options;
}

// The whole content of a checkpoint by key: the bytes of each tensor, the item bytes of each
// object.
using Content = std::map<std::string, Bytes>;

Content read_all(const FileImage& image) {
  const Checkpoint checkpoint = Checkpoint::open(Location(memory_storage(image)), small_options());
  Content content;
  for (const std::string& key : checkpoint.keys()) {
    if (checkpoint.metadata().find_tensor(key) != nullptr) {
      const TensorView tensor = checkpoint.read(key);
      content[key] = elements(tensor);
      const std::string shape = std::string(to_string(tensor.dtype)) + to_string(tensor.shape);
      content[key + " shape"] = to_bytes(shape);
    } else {
      checkpoint.read_object(key);
      content[key] = checkpoint.read_object_bytes(key);
    }
  }
  return content;
}

bool verify_finds(const FileImage& image) {
  try {
    return !Checkpoint::open(Location(memory_storage(image)), small_options()).verify().ok();
  } catch (const Error&) {
    return true;
  }
}

enum class Load { kThrows, kRight, kWrong };

Load try_load(const FileImage& image, const Content& expected) {
  try {
    return read_all(image) == expected ? Load::kRight : Load::kWrong;
  } catch (const Error&) {
    return Load::kThrows;
  }
}

struct Tally {
  size_t tried = 0;
  size_t found = 0;
  size_t harmless = 0;  // not found, and everything loads
  size_t silent = 0;    // a load gave other bytes without an error
};

class Damages {
 public:
  explicit Damages(FileImage image) : image_(std::move(image)), expected_(read_all(image_)) {
    EXPECT_FALSE(verify_finds(image_));
    EXPECT_FALSE(expected_.empty());
  }

  const FileImage& image() const { return image_; }

  void judge(const FileImage& damaged, Tally& tally, const std::string& what) const {
    ++tally.tried;
    const bool found = verify_finds(damaged);
    const Load load = try_load(damaged, expected_);
    if (found) ++tally.found;
    if (load == Load::kWrong) ++tally.silent;
    if (!found && load == Load::kRight) ++tally.harmless;
    EXPECT_TRUE(found || load != Load::kThrows) << what << ": verify finds nothing, a load fails";
  }

  // Each file truncated to every length that `wanted` picks.
  Tally truncations(const std::function<bool(const std::string&, size_t)>& wanted) const {
    Tally tally;
    for (const auto& [name, bytes] : image_) {
      FileImage damaged = image_;
      for (size_t keep = bytes.size(); keep-- > 0;) {
        damaged[name].resize(keep);
        if (wanted(name, keep)) judge(damaged, tally, name + " cut to " + std::to_string(keep));
      }
    }
    return tally;
  }

  // 1 to 64 bytes appended to each file, zeros and others.
  Tally appended() const {
    Tally tally;
    for (const auto& [name, bytes] : image_) {
      for (const std::byte value : {std::byte{0}, std::byte{0x2e}}) {
        FileImage damaged = image_;
        for (int count = 1; count <= kAppended; count += kAppendedStep) {
          damaged[name].resize(bytes.size() + static_cast<size_t>(count), value);
          judge(damaged, tally, name + " and " + std::to_string(count));
        }
      }
    }
    return tally;
  }

  // Each file zeroed from a multiple of `block` to its end, for every multiple.
  Tally zeroed_tails(size_t block) const {
    Tally tally;
    for (const auto& [name, bytes] : image_) {
      FileImage damaged = image_;
      for (size_t at = bytes.size() / block * block;; at -= block) {
        std::fill(damaged[name].begin() + static_cast<ptrdiff_t>(at), damaged[name].end(),
                  std::byte{0});
        if (damaged[name] != bytes)
          judge(damaged, tally, name + " zero from " + std::to_string(at));
        if (at == 0) break;
      }
    }
    return tally;
  }

  Tally missing() const {
    Tally tally;
    for (const auto& [name, bytes] : image_) {
      FileImage damaged = image_;
      damaged.erase(name);
      judge(damaged, tally, name + " missing");
    }
    return tally;
  }

  Tally swapped() const {
    Tally tally;
    for (auto a = image_.begin(); a != image_.end(); ++a) {
      for (auto b = std::next(a); b != image_.end(); ++b) {
        if (a->second == b->second) continue;
        if (!a->first.ends_with(".distcp") || !b->first.ends_with(".distcp")) continue;
        FileImage damaged = image_;
        std::swap(damaged[a->first], damaged[b->first]);
        judge(damaged, tally, a->first + " and " + b->first + " swapped");
      }
    }
    return tally;
  }

 private:
  const FileImage image_;
  const Content expected_;
};

class DamagedFiles : public testing::Test {
 protected:
  static void TearDownTestSuite() {
    std::printf("[          ] %zu damaged files in all, no wrong byte loaded from our own\n",
                total_);
  }
  static void print(const char* what, const Tally& tally) {
    std::printf("[          ] %s: %zu tried, %zu found, %zu harmless, %zu loaded wrong\n", what,
                tally.tried, tally.found, tally.harmless, tally.silent);
    total_ += tally.tried;
  }

 private:
  static inline size_t total_ = 0;
};

// ---- Written by us ----

// Files of two ranks, each of at least 5 KiB, so that 4 KiB can be removed.
FileImage ours() {
  const auto storage = memory_storage();
  run_ranks(2, [&](Communicator comm) {
    StateDict state = row_state(comm, 1);
    state["even"] = ShardedTensor::from_rank_offsets(
        "even", counting(DType::kInt32, {1100}, 2000 * comm.rank()), {{0, comm.rank(), 2}});
    state["scalar"] = counting(DType::kInt64, {}, 3);
    state["empty"] = TensorView::allocate(DType::kFloat32, {0, 4});
    state["note"] = std::string("three words here");
    state["objects"] = Value::list({Value(1), Value("two")});
    SaveOptions options;
    options.comm = comm;
    options.resources.buffer_bytes = 1u << 20;
    save(state, Location(storage), options);
  });
  return memory_image(*storage);
}

// The lock file is empty, and nothing reads it.
FileImage without_lock(FileImage image) {
  EXPECT_EQ(image.erase(".tilestone/lock"), 1u);
  return image;
}

const Damages& our_damages() {
  static const Damages damages(without_lock(ours()));
  return damages;
}

void expect_all_found(const Tally& tally, size_t at_least) {
  EXPECT_EQ(tally.found, tally.tried);
  EXPECT_EQ(tally.silent, 0u);
  EXPECT_GE(tally.tried, at_least);
}

TEST_F(DamagedFiles, EveryTruncationOfOurFilesIsFound) {
  const Tally tally =
      our_damages().truncations([](const std::string&, size_t keep) { return keep % kStep == 0; });
  print("ours, every length", tally);
  expect_all_found(tally, 8000 / kStep);
}

TEST_F(DamagedFiles, BytesAppendedToOurFilesAreFound) {
  const Tally tally = our_damages().appended();
  print("ours, 1 to 64 bytes appended", tally);
  expect_all_found(tally, 4 * 2 * (kAppended / kAppendedStep));
}

TEST_F(DamagedFiles, ZeroedTailsOfOurFilesAreFound) {
  for (const size_t block : {512, 4096}) {
    const Tally tally = our_damages().zeroed_tails(block);
    print(block == 512 ? "ours, tails zeroed at 512 B" : "ours, tails zeroed at 4 KiB", tally);
    expect_all_found(tally, block == 512 ? 20 : 5);
  }
}

TEST_F(DamagedFiles, OurMissingAndSwappedFilesAreFound) {
  const Tally missing = our_damages().missing();
  print("ours, a file missing", missing);
  expect_all_found(missing, 4);
  const Tally swapped = our_damages().swapped();
  print("ours, two data files swapped", swapped);
  expect_all_found(swapped, 1);
}

TEST_F(DamagedFiles, OurLockFileIsNotPartOfTheCheckpoint) {
  FileImage image = ours();
  const Damages damages(image);
  Tally tally;
  image[".tilestone/lock"] = to_bytes("anything");
  damages.judge(image, tally, "other content of the lock file");
  damages.judge(without_lock(image), tally, "no lock file");
  print("ours, the lock file", tally);
  EXPECT_EQ(tally.harmless, tally.tried);
}

// ---- Written by stock PyTorch ----
//
// There is no manifest, so file sizes are not recorded. Items have checksums of their own records,
// but none that ties an item to its key. Therefore bytes after a file's last item are not noticed
// (which is harmless, because nothing reads them). Swapped files whose items have the same offsets,
// dtypes and shapes are not noticed either; no reader could notice that.

const Damages& stock_damages() {
  static const Damages damages(image_of(golden("torch-2.14.1/dcp-w4")));
  return damages;
}

// Picks every length of the metadata, and some lengths of data files; all of these would take
// minutes.
bool picked(const std::string& name, size_t keep) {
  return keep % (name == ".metadata" ? 7 * kStep : 41 * kStep) == 0;
}

TEST_F(DamagedFiles, TruncationsOfStockFilesAreFoundOrHarmless) {
  const Tally tally = stock_damages().truncations(picked);
  print("torch 2.14.1, lengths", tally);
  EXPECT_EQ(tally.found + tally.harmless, tally.tried);
  EXPECT_EQ(tally.silent, 0u);
  EXPECT_GE(tally.tried, 1000 / kStep);
}

TEST_F(DamagedFiles, BytesAppendedToStockFilesAreFoundOrHarmless) {
  const Tally tally = stock_damages().appended();
  print("torch 2.14.1, 1 to 64 bytes appended", tally);
  EXPECT_EQ(tally.found + tally.harmless, tally.tried);
  EXPECT_EQ(tally.silent, 0u);
}

TEST_F(DamagedFiles, ZeroedTailsOfStockFilesAreFoundOrHarmless) {
  for (const size_t block : {512, 4096}) {
    const Tally tally = stock_damages().zeroed_tails(block);
    print(block == 512 ? "torch 2.14.1, tails zeroed at 512 B" : "torch 2.14.1, tails at 4 KiB",
          tally);
    EXPECT_EQ(tally.found + tally.harmless, tally.tried);
    EXPECT_EQ(tally.silent, 0u);
  }
}

TEST_F(DamagedFiles, MissingStockFilesAreFoundOrHoldNothing) {
  const Tally tally = stock_damages().missing();
  print("torch 2.14.1, a file missing", tally);
  EXPECT_EQ(tally.found + tally.harmless, tally.tried);
  EXPECT_EQ(tally.silent, 0u);
  EXPECT_GE(tally.found, 4u);
}

TEST_F(DamagedFiles, SwappedStockFilesAreFoundUnlessTheyHoldTheSamePlaces) {
  const Tally tally = stock_damages().swapped();
  print("torch 2.14.1, two data files swapped", tally);
  EXPECT_GE(tally.tried, 6u);
  EXPECT_EQ(tally.found + tally.silent + tally.harmless, tally.tried);
}

}  // namespace tilestone::damage_test
