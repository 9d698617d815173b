// Conversions to zarr in an object store, whose files have the names of every such checkpoint.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/convert/convert.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::convert_objects_test {

constexpr int64_t kFirst = 100;

ConvertResult to_zarr(const std::shared_ptr<Storage>& target, const std::string& dialect) {
  static const TempDirectory source;  // stores in memory have one place
  static const SaveResult saved = save(row_state(0, 1, kFirst), source.path());
  ConvertOptions options;
  options.format = "zarr";
  options.dialect = dialect;
  return convert(Location(source.path()), Location(target), options);
}

void expect_converted(const std::shared_ptr<Storage>& store) {
  const Checkpoint checkpoint = Checkpoint::open(Location(store));
  EXPECT_TRUE(checkpoint.verify().ok());
  EXPECT_EQ(elements(checkpoint.read("w")), elements(counting(DType::kFloat32, {1, 8}, kFirst)));
}

TEST(ConvertObjects, WhatAKilledConversionToZarrLeavesIsRemovedByGcAndByTheNextOne) {
  const LogLevel level = set_log_level(LogLevel::kOff);
  for (const std::string dialect : {"pytorch", "megatron"}) {
    bool is_killed = true;
    for (uint64_t at = 0; is_killed; ++at) {
      SCOPED_TRACE(dialect + " " + std::to_string(at));
      const auto store = memory_objects();
      const auto disk = FaultDisk::create(store, [&](const StorageCall& call) {
        return call.index == at ? FaultAction::die_after() : FaultAction::pass();
      });
      is_killed = false;
      try {
        to_zarr(disk->storage(), dialect);
      } catch (const Error&) {
        is_killed = true;
      }
      const bool exists = store->stat("metadata.json").has_value();
      const bool cleans = at % 2 == 0;
      if (cleans && !store->list().empty()) remove_leftovers(Location(store));
      if (cleans && !exists) {
        EXPECT_THAT(store->list(), testing::IsEmpty());
      }
      if (!exists) to_zarr(store, dialect);
      expect_converted(store);
      if (!exists || cleans) {
        EXPECT_TRUE(find_leftovers(Location(store)).empty());
      }
    }
  }
  set_log_level(level);
}

TEST(ConvertObjects, WhatAKilledOneLeavesAndCantBeRemovedJoinsNoOther) {
  const auto store = memory_objects();
  const auto killed = FaultDisk::create(store, [](const StorageCall& call) {
    const bool is_last = call.op == StorageOp::kSync && call.name == "w/0.0";
    return is_last ? FaultAction::die_after() : FaultAction::pass();
  });
  EXPECT_THROW(to_zarr(killed->storage(), "pytorch"), Error);
  ASSERT_TRUE(store->stat("w/0.0"));
  const auto locked = FaultDisk::create(store, [](const StorageCall& call) {
    const bool is_remain = call.op == StorageOp::kRemove && call.name == "w/0.0";
    return is_remain ? FaultAction::fail(EACCES) : FaultAction::pass();
  });
  expect_error([&] { to_zarr(locked->storage(), "pytorch"); }, ErrorCode::kIo, "w/0.0");
  EXPECT_FALSE(store->stat("metadata.json"));
  to_zarr(store, "pytorch");
  expect_converted(store);
}

TEST(ConvertObjects, WhatAFailedOneCantRemoveIsRemovedByTheNextOne) {
  const auto store = memory_objects();
  const auto failing = FaultDisk::create(store, [](const StorageCall& call) {
    if (call.name != "w/0.0") return FaultAction::pass();
    if (call.op == StorageOp::kSync) return FaultAction::fail_after(EIO);
    return call.op == StorageOp::kRemove ? FaultAction::fail(EIO) : FaultAction::pass();
  });
  EXPECT_THROW(to_zarr(failing->storage(), "pytorch"), Error);
  ASSERT_TRUE(store->stat("w/0.0"));
  to_zarr(store, "pytorch");
  expect_converted(store);
}

// It is there before the conversion writes its own file of this name, or its index.
TEST(ConvertObjects, AFileOfAnotherProgramEndsTheConversionAndStays) {
  for (const std::string name : {"w/0.0", "w/.zarray", "metadata.json"}) {
    SCOPED_TRACE(name);
    const auto store = memory_objects();
    bool is_first = true;
    const auto disk = FaultDisk::create(store, [&](const StorageCall& call) {
      if (call.op == StorageOp::kCreate && std::exchange(is_first, false)) {
        store->put(name, as_bytes("theirs"), Condition::absent(), "x", Deadline::never());
      }
      return FaultAction::pass();
    });
    expect_error([&] { to_zarr(disk->storage(), "pytorch"); }, ErrorCode::kAlreadyExists, "");
    EXPECT_FALSE(is_first);
    EXPECT_THAT(store->list(), testing::ElementsAre(name));
  }
}

// Another conversion has taken the claim over, and the first one goes on.
TEST(ConvertObjects, WhoHasLostTheClaimRemovesNothing) {
  const auto store = memory_objects();
  bool is_first = true;
  const auto disk = FaultDisk::create(store, [&](const StorageCall& call) {
    if (call.op == StorageOp::kSync && call.name == "w/0.0" && std::exchange(is_first, false)) {
      store->remove(".tilestone/lock");
      std::this_thread::sleep_for(4 * MemoryObjects::kLeasePeriod);
      to_zarr(store, "pytorch");
    }
    return FaultAction::pass();
  });
  expect_error([&] { to_zarr(disk->storage(), "pytorch"); }, ErrorCode::kAlreadyExists, "");
  EXPECT_FALSE(is_first);
  expect_converted(store);
}

}  // namespace tilestone::convert_objects_test
