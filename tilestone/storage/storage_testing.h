// For tests: temporary directories, and the conformance suite that every Storage must pass.
//
//   INSTANTIATE_TEST_SUITE_P(Memory, StorageConformance,
//                            testing::Values(StorageCase{"plain", [] { ... }}), storage_case_name);
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>

#include "tilestone/base/error.h"
#include "tilestone/storage/storage.h"

namespace tilestone {

// A new directory in `parent`, removed with its contents when the object is destroyed.
class TempDirectory {
 public:
  explicit TempDirectory(const std::string& parent = testing::TempDir());
  ~TempDirectory();
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// A separate real file system of 4 MiB. Converts to false if the test is not allowed to mount one.
class SmallMount {
 public:
  SmallMount();
  ~SmallMount();
  SmallMount(const SmallMount&) = delete;
  SmallMount& operator=(const SmallMount&) = delete;
  explicit operator bool() const { return mounted_; }
  const char* path() const { return directory_.path().c_str(); }
  bool make_read_only() const;

 private:
  TempDirectory directory_;
  bool mounted_;
};

// `size` bytes that depend on the offset and the seed.
Bytes pattern_bytes(size_t size, uint64_t seed = 0);

// Whether both hold the same bytes. Fast under sanitizers too.
bool same_bytes(ByteView a, ByteView b);

// Whether `trial` returns true in at least one of a few runs. For tests of what is in the page
// cache: the kernel may evict pages when memory is short, which is not a fault of the tested code.
bool in_some_trial(const std::function<bool()>& trial);

// Writes a whole file, durably.
void put_file(Storage& storage, const std::string& name, ByteView bytes);

// An empty storage under test, and the directory that must outlive it.
struct TestedStorage {
  std::shared_ptr<Storage> storage;
  std::shared_ptr<TempDirectory> directory;  // null: the storage is not in the file system
};

struct StorageCase {
  std::string name;
  std::function<TestedStorage()> make;
};

class StorageConformance : public testing::TestWithParam<StorageCase> {
 protected:
  StorageConformance() : tested_(GetParam().make()) {}
  Storage& storage() { return *tested_.storage; }

 private:
  TestedStorage tested_;
};

// The parts of the suite for a storage with directories, and for an object store.
class DirectoryConformance : public StorageConformance {};
class ObjectConformance : public StorageConformance {};

inline std::string storage_case_name(const testing::TestParamInfo<StorageCase>& info) {
  return info.param.name;
}

// EXPECTs that `call` throws an Error with this code whose text contains `text`.
void expect_error(const std::function<void()>& call, ErrorCode code, const std::string& text = "");

}  // namespace tilestone
