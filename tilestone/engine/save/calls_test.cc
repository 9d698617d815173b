// How many calls a save and a load make at their place. On a file server each is a message.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <set>

#include "tilestone/engine/engine_testing.h"
#include "tilestone/storage/posix_internal.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::calls_test {

// The real system. Counts the calls that go through it, and tells a listing of a directory, which
// opens it, from a sync of one, which opens it too.
class CountingSystem final : public System {
 public:
  struct Counts {
    int calls = 0, syncs = 0, listings = 0;
  };
  Counts take() {
    std::lock_guard lock(mutex_);
    Counts counts = std::exchange(counts_, {});
    counts.listings += static_cast<int>(opened_.size());
    opened_.clear();
    return counts;
  }

  int open_beneath(int directory, const char* name, int flags, unsigned mode) override {
    const int fd = System::open_beneath(directory, name, flags, mode);
    std::lock_guard lock(mutex_);
    ++counts_.calls;
    if (opened_.erase(fd) > 0) ++counts_.listings;
    if (fd >= 0 && (flags & O_DIRECTORY) != 0 && (flags & O_PATH) == 0) opened_.insert(fd);
    return fd;
  }
  int fsync(int fd) override {
    {
      std::lock_guard lock(mutex_);
      ++counts_.calls;
      ++counts_.syncs;
      opened_.erase(fd);
    }
    return System::fsync(fd);
  }
  ssize_t pwrite(int fd, const void* data, size_t size, uint64_t offset) override {
    count();
    return System::pwrite(fd, data, size, offset);
  }
  int rename_exclusive(int from_directory, const char* from, int to_directory,
                       const char* to) override {
    count();
    return System::rename_exclusive(from_directory, from, to_directory, to);
  }
  int lock(int fd) override {
    count();
    return System::lock(fd);
  }
  std::unique_ptr<IoQueue> uring_queue(unsigned, int& error) override {
    error = ENOSYS;
    return nullptr;
  }

 private:
  void count() {
    std::lock_guard lock(mutex_);
    ++counts_.calls;
  }

  std::mutex mutex_;
  Counts counts_;
  std::set<int> opened_;  // directories that were opened and not synced yet
};

TEST(Calls, ASaveIntoAnEmptyPlaceAndALoadMakeFew) {
  const TempDirectory folder;
  const auto system = std::make_shared<CountingSystem>();
  const Location place(posix_storage(folder.path() + "/ckpt", {}, system));
  StateDict state;
  state["w"] = counting(DType::kFloat32, {4});
  SaveOptions options;
  options.resources.threads = 1;
  save(state, place, options);
  const CountingSystem::Counts saved = system->take();
  EXPECT_LE(saved.listings, 3);
  EXPECT_LE(saved.syncs, 9);
  EXPECT_LE(saved.calls, 60);
  StateDict wanted;
  wanted["w"] = counting(DType::kFloat32, {4}, 7);
  load(wanted, place);
  const CountingSystem::Counts loaded = system->take();
  EXPECT_LE(loaded.listings, 2);
  EXPECT_LE(loaded.calls, 12);
  std::printf("[          ] save: %d listings, %d syncs, %d calls; load: %d listings, %d calls\n",
              saved.listings, saved.syncs, saved.calls, loaded.listings, loaded.calls);
}

}  // namespace tilestone::calls_test
