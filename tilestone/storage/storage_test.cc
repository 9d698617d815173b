// The conformance suite over every kind of storage.
#include "tilestone/storage/storage.h"

#include "tilestone/storage/memory_storage.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone {
namespace {

StorageCase posix_case(const std::string& name, PosixOptions options, const std::string& parent) {
  return {name, [options, parent] {
            auto directory = std::make_shared<TempDirectory>(parent);
            return TestedStorage{posix_storage(directory->path(), options), directory};
          }};
}

StorageCase memory_case() {
  return {"memory", [] { return TestedStorage{memory_storage(), nullptr}; }};
}

using Calls = PosixOptions::Calls;
using Cache = PosixOptions::Cache;

const std::string kDisk = testing::TempDir();
const std::string kTmpfs = "/dev/shm";  // on every Linux

INSTANTIATE_TEST_SUITE_P(
    Storages, StorageConformance,
    testing::Values(
        posix_case("posix", {}, kDisk),
        posix_case("posix_uring_direct", {Calls::kAuto, Cache::kDirect, Cache::kDirect, 4}, kDisk),
        posix_case("posix_uring_buffered", {Calls::kAuto, Cache::kBuffered, Cache::kBuffered, 8},
                   kDisk),
        posix_case("posix_plain_direct", {Calls::kPlain, Cache::kDirect, Cache::kDirect, 4}, kDisk),
        posix_case("posix_plain_buffered", {Calls::kPlain, Cache::kBuffered, Cache::kBuffered, 1},
                   kDisk),
        posix_case("posix_tmpfs", {Calls::kAuto, Cache::kDirect, Cache::kDirect, 8}, kTmpfs),
        memory_case()),
    storage_case_name);

}  // namespace
}  // namespace tilestone
