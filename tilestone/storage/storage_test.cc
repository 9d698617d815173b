// Runs the conformance suite on every kind of storage.
#include "tilestone/storage/storage.h"

#include <cerrno>
#include <cstdio>
#include <vector>

#include "tilestone/base/sanitized_testing.h"
#include "tilestone/storage/directories.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"
#include "tilestone/storage/posix_testing.h"
#include "tilestone/storage/private_map.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::storage_test {

StorageCase posix_case(const std::string& name, PosixOptions options, const std::string& parent) {
  return {name, [options, parent] {
            auto directory = std::make_shared<TempDirectory>(parent);
            return TestedStorage{posix_storage(directory->path(), options), directory};
          }};
}

StorageCase memory_case() {
  return {"memory", [] { return TestedStorage{memory_storage(), nullptr}; }};
}

StorageCase fault_case() {
  return {"fault_memory",
          [] { return TestedStorage{FaultDisk::create(memory_storage())->storage(), nullptr}; }};
}

// A directory of another storage.
StorageCase child_case(StorageCase of) {
  return {"child_of_" + of.name, [make = of.make] {
            TestedStorage tested = make();
            tested.storage = tested.storage->child("a/child");
            tested.storage->directories()->make("");
            return tested;
          }};
}

// A kernel and a file system that support none of the newer calls.
class OldSystem : public System {
 public:
  int reserve(int, uint64_t) override { return refuse(EOPNOTSUPP); }
  int set_direct(int, bool direct) override { return direct ? refuse(EINVAL) : 0; }
  int open_beneath(int, const char*, int, unsigned) override { return refuse(ENOSYS); }
  int rename_exclusive(int, const char*, int, const char*) override { return refuse(ENOSYS); }
  int rename_exchange(int, const char*, int, const char*) override { return refuse(EINVAL); }
  int cached_bytes(int, uint64_t, uint64_t, uint64_t&) override { return refuse(ENOSYS); }
  ssize_t read_cached(int, void*, size_t, uint64_t) override { return refuse(EOPNOTSUPP); }
  int populate(int, uint64_t, uint64_t) override { return refuse(EINVAL); }
  int populate_large_folios(int, uint64_t, uint64_t) override { return refuse(EINVAL); }
  std::unique_ptr<IoQueue> uring_queue(unsigned, int& error) override {
    error = EPERM;
    return nullptr;
  }

 private:
  static int refuse(int error) {
    errno = error;
    return -1;
  }
};

// System calls that do less than requested, or must be repeated.
class HaltingSystem : public System {
 public:
  ssize_t pread(int fd, void* data, size_t size, uint64_t offset) override {
    if (halt()) return -1;
    return System::pread(fd, data, shorten(size), offset);
  }
  ssize_t read_cached(int fd, void* data, size_t size, uint64_t offset) override {
    if (halt()) return -1;
    return System::read_cached(fd, data, shorten(size), offset);
  }
  ssize_t pwrite(int fd, const void* data, size_t size, uint64_t offset) override {
    if (halt()) return -1;
    return System::pwrite(fd, data, shorten(size), offset);
  }
  std::unique_ptr<IoQueue> uring_queue(unsigned, int& error) override {
    error = EPERM;  // so that the queue over threads makes the calls above
    return nullptr;
  }

 private:
  bool halt() {
    const unsigned turn = turn_.fetch_add(1) % 5;
    if (turn > 1) return false;
    errno = turn == 0 ? EINTR : EAGAIN;
    return true;
  }
  size_t shorten(size_t size) {
    if (size < 4096) return (size + 1) / 2;
    return (size / 3 + 4095) / 4096 * 4096;
  }
  std::atomic<unsigned> turn_ = 0;
};

StorageCase posix_case(const std::string& name, std::shared_ptr<System> system,
                       PosixOptions options) {
  return {name, [options, system] {
            auto directory = std::make_shared<TempDirectory>();
            return TestedStorage{posix_storage(directory->path(), options, system), directory};
          }};
}

// For tests/file_systems, which prints it next to the name of the file system.
TEST(Storage, SaysWhatItCan) {
  const TempDirectory directory;
  const auto storage = posix_storage(directory.path());
  storage->make_file("file", to_bytes("x"), Deadline::never());
  const bool maps = map_private(*storage->open("file")) != nullptr;
  std::printf("can: exchange %s, map %s\n", storage->directories()->can_exchange() ? "yes" : "no",
              maps ? "yes" : "no");
}

constexpr PosixOptions kDirect{.direct_write = 0, .direct_read = 0, .queue_depth = 4};
constexpr PosixOptions kBuffered{
    .direct_write = UINT64_MAX, .direct_read = UINT64_MAX, .queue_depth = 1};

const std::string kDisk = testing::TempDir();
const std::string kTmpfs = "/dev/shm";  // exists on every Linux

std::vector<StorageCase> storage_cases() {
  std::vector<StorageCase> cases{
      posix_case("posix_uring_direct", std::make_shared<ColdSystem>(true), kDirect),
      posix_case("posix_plain_direct", std::make_shared<ColdSystem>(false), kDirect),
      posix_case("posix_plain_buffered", std::make_shared<FailingSystem>(), kBuffered),
      posix_case("posix_halting_direct", std::make_shared<HaltingSystem>(), kDirect),
      memory_case(),
      fault_case()};
  if (kThreadSanitized) return cases;  // the others use the same threads and locks
  for (StorageCase& other : std::vector<StorageCase>{
           posix_case("posix", {}, kDisk), posix_case("posix_uring_buffered", kBuffered, kDisk),
           posix_case("posix_tmpfs", kDirect, kTmpfs),
           posix_case("posix_old_system", std::make_shared<OldSystem>(), {}),
           posix_case("posix_halting_buffered", std::make_shared<HaltingSystem>(), kBuffered),
           child_case(memory_case()), child_case(fault_case()),
           child_case(posix_case("posix", {}, kDisk))}) {
    cases.push_back(std::move(other));
  }
  return cases;
}

std::vector<StorageCase> object_cases() {
  const StorageCase plain = {"objects", [] { return TestedStorage{memory_objects(), nullptr}; }};
  const StorageCase fault = {
      "fault_objects",
      [] { return TestedStorage{FaultDisk::create(memory_objects())->storage(), nullptr}; }};
  const StorageCase child = {"child_of_objects", [] {
                               return TestedStorage{memory_objects()->child("a/child"), nullptr};
                             }};
  return {plain, fault, child};
}

INSTANTIATE_TEST_SUITE_P(Storages, StorageConformance, testing::ValuesIn(storage_cases()),
                         storage_case_name);
INSTANTIATE_TEST_SUITE_P(Storages, DirectoryConformance, testing::ValuesIn(storage_cases()),
                         storage_case_name);
INSTANTIATE_TEST_SUITE_P(Objects, StorageConformance, testing::ValuesIn(object_cases()),
                         storage_case_name);
INSTANTIATE_TEST_SUITE_P(Objects, ObjectConformance, testing::ValuesIn(object_cases()),
                         storage_case_name);

}  // namespace tilestone::storage_test
