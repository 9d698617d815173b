#include "tilestone/engine/write/new_files_internal.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <map>
#include <mutex>

#include "tilestone/base/error_testing.h"
#include "tilestone/storage/fault_storage_testing.h"

namespace tilestone::engine::new_files_test {

struct Counted {
  std::mutex mutex;
  std::map<StorageOp, int> calls;
  std::map<std::string, int> directory_syncs;

  FaultHook hook() {
    return [this](const StorageCall& call) {
      std::lock_guard lock(mutex);
      ++calls[call.op];
      if (call.op == StorageOp::kSettle) ++directory_syncs[std::string(call.name)];
      return FaultAction::pass();
    };
  }
};

std::vector<std::string> many_names() {
  std::vector<std::string> names;
  for (int i = 0; i < 40; ++i) names.push_back("a" + std::to_string(i) + "/b/.zarray");
  return names;
}

std::vector<NewFile> files_of(const std::vector<std::string>& names) {
  std::vector<NewFile> files;
  for (const std::string& name : names) files.push_back({&name, as_bytes(name)});
  return files;
}

TEST(NewFiles, AreDurableWithOneSyncOfEachFileAndOfEachDirectory) {
  const std::vector<std::string> names = many_names();
  for (const int threads : {1, 4}) {
    Counted counted;
    const auto disk = FaultDisk::create(memory_storage(), counted.hook());
    std::vector<std::string> noted;
    write_new_files(*disk->storage(), files_of(names), threads, Deadline::never(),
                    [&](const std::string& name) { noted.push_back(name); });
    std::sort(noted.begin(), noted.end());
    std::vector<std::string> sorted = names;
    std::sort(sorted.begin(), sorted.end());
    EXPECT_EQ(noted, sorted);
    EXPECT_EQ(counted.calls[StorageOp::kSync], 40);
    EXPECT_EQ(counted.calls[StorageOp::kRename], 0);
    EXPECT_EQ(counted.directory_syncs.size(), 81u);  // the root, and two for each file
    for (const auto& [name, count] : counted.directory_syncs) EXPECT_EQ(count, 1) << name;
    const FileImage image = disk->surviving_image(Survival::kNothingUnsynced);
    ASSERT_EQ(image.size(), names.size());
    for (const std::string& name : names) EXPECT_EQ(as_text(image.at(name)), name);
  }
}

TEST(NewFiles, NamesThatMayBeThereAreNotedAndOtherSavesFilesAreNot) {
  const std::vector<std::string> names = {"a", "b", "c"};
  std::vector<std::string> noted;
  const auto note = [&](const std::string& name) { noted.push_back(name); };
  const auto taken = memory_storage({{"b", Bytes(1)}});
  Error error =
      error_of([&] { write_new_files(*taken, files_of(names), 1, Deadline::never(), note); });
  EXPECT_EQ(error.code(), ErrorCode::kAlreadyExists);
  EXPECT_EQ(noted, std::vector<std::string>{"a"});

  noted.clear();
  const auto disk = FaultDisk::create(memory_storage(), [](const StorageCall& call) {
    const bool second = call.op == StorageOp::kCreate && call.name == "b";
    return second ? FaultAction::fail_after(EIO) : FaultAction::pass();
  });
  error = error_of(
      [&] { write_new_files(*disk->storage(), files_of(names), 1, Deadline::never(), note); });
  EXPECT_EQ(error.code(), ErrorCode::kIo);
  EXPECT_EQ(noted, (std::vector<std::string>{"a", "b"}));
}

}  // namespace tilestone::engine::new_files_test
