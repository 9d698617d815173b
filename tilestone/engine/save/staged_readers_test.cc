// Readers of a location that is replaced as a whole while they read.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "tilestone/comm/communicator.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/open/description_internal.h"
#include "tilestone/engine/open/opening_internal.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/storage/directories.h"
#include "tilestone/storage/posix_internal.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::staged_readers_test {

SaveOptions options_of(const std::shared_ptr<const Dialect>& dialect) {
  SaveOptions options;
  options.dialect = dialect;
  options.overwrite = true;
  options.resources.buffer_bytes = 1u << 20;
  options.resources.threads = 1;
  return options;
}

TEST(StagedReaders, AReaderOfAReplacedCheckpointReadsNothingOfTheNewOne) {
  const TempDirectory folder;
  const std::string path = folder.path() + "/ckpt";
  save(row_state(solo(), 1), path, options_of(megatron_dialect()));
  const Checkpoint checkpoint = Checkpoint::open(path);
  save(row_state(solo(), 2), path, options_of(megatron_dialect()));
  expect_error([&] { checkpoint.read("w"); }, ErrorCode::kNotFound,
               "another save may have replaced the checkpoint");
  expect_rows(path, 2, 1);
}

// Runs a hook before a file whose name ends like this is opened for the first time.
class HookedSystem : public System {
 public:
  HookedSystem(std::string ending, std::function<void()> hook)
      : ending_(std::move(ending)), hook_(std::move(hook)) {}

  int open_beneath(int directory, const char* name, int flags, unsigned mode) override {
    if (hook_ && std::string_view(name).ends_with(ending_)) std::exchange(hook_, nullptr)();
    return System::open_beneath(directory, name, flags, mode);
  }

 private:
  const std::string ending_;
  std::function<void()> hook_;
};

// The save that replaces the checkpoint has removed its manifest when the reader looks for it. An
// index of zarr without a manifest looks like one of another program.
TEST(StagedReaders, AReaderFromWhomTheManifestIsTakenReadsTheNewCheckpoint) {
  for (const auto& dialect : {pytorch_dialect(), megatron_dialect()}) {
    const TempDirectory folder;
    SaveOptions options = options_of(dialect);
    options.format = format_named("zarr");
    options.attributes = {{"is", "old"}};
    save(row_state(solo(), 1), folder.path() + "/ckpt", options);
    options.attributes = {{"is", "new"}};
    save(row_state(solo(), 2), folder.path() + "/other", options);
    bool replaced = false;
    const auto replace = [&] {
      replaced = true;
      const auto parent = posix_storage(folder.path());
      parent->directories()->exchange("ckpt", "other");
      for (const std::string& name : parent->list("other/.tilestone/")) {
        if (name.ends_with("manifest")) parent->remove(name);
      }
    };
    const auto system = std::make_shared<HookedSystem>(".zarray", replace);
    const auto storage = posix_storage(folder.path() + "/ckpt", {}, system);
    const auto found = engine::find_checkpoint(storage, nullptr);
    EXPECT_TRUE(replaced);
    const engine::Opened opened = engine::open_description(found.description, nullptr);
    ASSERT_TRUE(opened.manifest);
    EXPECT_EQ(opened.manifest->attributes.at("is"), "new");
  }
}

// A rank opens the directory after it was exchanged: zarr's file names do not distinguish the
// saves.
TEST(StagedReaders, ARankThatHoldsAnotherCheckpointThanTheCoordinatorIsAnError) {
  const TempDirectory folder;
  const std::string path = folder.path() + "/ckpt";
  const auto zarr = format_named("zarr");
  SaveOptions options = options_of(pytorch_dialect());
  options.format = zarr;
  save(row_state(solo(), 1), path, options);
  const auto storage = posix_storage(path);
  const auto found = engine::find_checkpoint(storage, nullptr);
  const engine::Opened opened = engine::open_description(found.description, nullptr);
  EXPECT_NO_THROW(engine::expect_same_checkpoint(*engine::hold(storage), opened));
  save(row_state(solo(), 2), path, options);
  expect_error([&] { engine::expect_same_checkpoint(*engine::hold(storage), opened); },
               ErrorCode::kNotFound, "another save may have replaced the checkpoint");
  const Checkpoint checkpoint = Checkpoint::open(path);
  save(row_state(solo(), 3), path, options);
  expect_error([&] { checkpoint.read("w"); }, ErrorCode::kNotFound,
               "another save may have replaced the checkpoint");
  expect_rows(path, 3, 1);
}

}  // namespace tilestone::staged_readers_test
