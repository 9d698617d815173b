// Saves without a communicator in which the machine crashes, or processes die, at every disk call.
// What is left is no checkpoint or a complete one, and restarted ranks complete it.
#include <gtest/gtest.h>

#include <iostream>

#include "tilestone/base/error.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/open/attempt_files_internal.h"
#include "tilestone/format/archive/torch_archive.h"
#include "tilestone/format/known/known.h"
#include "tilestone/storage/crashes_testing.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"

namespace tilestone::crash_points_by_files_test {

constexpr int kRanks = 2;

// The machine, or a rank, dies at every n-th point. CMake sets it; it is greater than 1 under
// sanitizers.
constexpr uint64_t kStride = TILESTONE_CRASH_STRIDE;

// Runs for each dialect: on a disk, and in objects.
class SaveByFilesCrashes : public testing::TestWithParam<std::string> {};

bool is_of(std::string_view what) {
  return SaveByFilesCrashes::GetParam().find(what) != std::string::npos;
}
bool is_megatron() { return is_of("megatron"); }

// In objects the claims of who has died have lapsed.
std::shared_ptr<Storage> storage_of(FileImage image) {
  if (!is_of("objects")) return memory_storage(std::move(image));
  std::erase_if(image, [](const auto& file) {
    return file.first.ends_with(".claim") || file.first.ends_with("/lock");
  });
  return memory_objects(std::move(image));
}

SaveOptions by_files(int rank, const std::string& token) {
  SaveOptions options;
  options.dialect = dialect_named(is_megatron() ? "megatron" : "pytorch");
  options.by_files = ByFiles{rank, kRanks, token};
  options.by_files->wait = rank + 1 == kRanks;
  options.timeout = 20;
  options.resources.threads = 1;
  options.copies.emplace();
  for (int other = 0; other < kRanks; ++other) options.copies->group.push_back(other);
  return options;
}

// "all" is written once and copied to the other rank's file. The holders of "p" are not declared:
// in PyTorch's dialect each rank writes it, in Megatron-Core's it is common state.
StateDict state_of(int rank, int64_t first) {
  StateDict state;
  ShardedTensor all =
      ShardedTensor::from_rank_offsets("all", counting(DType::kInt64, {5}, first), {}, {rank});
  for (int other = 0; other < kRanks; ++other) all.holders.push_back(other);
  state["all"] = all;
  state["w"] = ShardedTensor::from_rank_offsets(
      "w", counting(DType::kFloat32, {1, 8}, first + 8 * rank), {{0, rank, kRanks}});
  state["p"] = counting(DType::kInt64, {3}, first);
  state["step"] = Value(first);
  return state;
}

// Each rank has its own client. A rank whose client is dead throws; the others continue.
void save_all(const std::function<std::shared_ptr<Storage>(int)>& storage, int64_t first,
              const std::string& token) {
  for (int rank = 0; rank < kRanks; ++rank) {
    try {
      save(state_of(rank, first), Location(storage(rank)), by_files(rank, token));
    } catch (const Error&) {
    }
  }
}

// What Megatron-Core finds: 0 if there is no metadata.json, else the value in common.pt.
int64_t stock_finds(Storage& storage) {
  if (!storage.stat("metadata.json")) return 0;
  EXPECT_TRUE(storage.stat(".metadata"));
  const Value common = read_torch_archive(read_file(storage, "common.pt", UINT64_MAX));
  return common.find("step")->as_int();
}

// 0: no checkpoint; else the first value of its state.
int64_t found_at(const std::shared_ptr<Storage>& storage) {
  const int64_t of_stock = is_megatron() ? stock_finds(*storage) : 0;
  try {
    const Checkpoint checkpoint = Checkpoint::open(Location(storage));
    EXPECT_TRUE(checkpoint.verify().ok());
    EXPECT_EQ(checkpoint.metadata().copies.size(), is_megatron() ? 1u : 2u);
    const int64_t first = step_of(checkpoint).as_int();
    expect_rows(Location(storage), first, kRanks);
    EXPECT_TRUE(!is_megatron() || of_stock == first) << of_stock;
    return first;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotFound) << error.what();
    EXPECT_EQ(of_stock, 0);
    return 0;
  }
}

struct Counts {
  int images = 0;
  int whole = 0;
  int claimed = 0;  // no checkpoint, but some files of Megatron-Core's index
};

// A save under another token beside what the dead save has left. Its checkpoint then exists, unless
// the dead save was so far that only it can be completed.
void expect_that_another_may_follow(const std::shared_ptr<Storage>& storage, Counts& counts) {
  const bool claimed = storage->stat(".metadata").has_value();
  save_all([&](int) { return storage; }, 4, "another token");
  EXPECT_EQ(found_at(storage), claimed ? 0 : 4);
  if (!claimed) return;
  ++counts.claimed;
  publish(Location(storage), {.save_id = engine::save_id_of("the first token", 0)});
  EXPECT_EQ(found_at(storage), 3);
}

void expect_recovery(const FileImage& image, Counts& counts) {
  ++counts.images;
  const auto fresh = [&] { return storage_of(image); };
  const int64_t found = found_at(fresh());
  EXPECT_TRUE(found == 0 || found == 3) << found;
  counts.whole += found == 3 ? 1 : 0;
  // Repeats the save under the same token.
  const auto same = fresh();
  save_all([&](int) { return same; }, 3, "the first token");
  EXPECT_EQ(found_at(same), 3);
  remove_leftovers(Location(same));
  EXPECT_EQ(found_at(same), 3);
  if (found == 3) return;
  expect_that_another_may_follow(fresh(), counts);
  // Abandons the save, unless everything has been written; then the location is free for any save.
  const auto given_up = fresh();
  AbandonOptions at_once;
  at_once.period = 0;
  try {
    abandon(Location(given_up), at_once);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kUnsupported || error.code() == ErrorCode::kAlreadyExists) {
      publish(Location(given_up));
      EXPECT_EQ(found_at(given_up), 3);
      return;
    }
    EXPECT_EQ(error.code(), ErrorCode::kNotFound) << error.what();
  }
  try {
    remove_leftovers(Location(given_up));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotFound) << error.what();
  }
  EXPECT_EQ(found_at(given_up), 0);
  StateDict state;
  state["step"] = Value(5);
  save(state, Location(given_up));
  EXPECT_EQ(step_of(Checkpoint::open(Location(given_up))).as_int(), 5);
}

std::shared_ptr<FaultDisk> save_on(const FaultHook& hook) {
  auto disk = FaultDisk::create(storage_of({}), hook);
  save_all([&](int rank) { return disk->storage(rank); }, 3, "the first token");
  return disk;
}

TEST_P(SaveByFilesCrashes, AfterAPowerLossAtAnyCallThereIsNoCheckpointOrTheWholeOne) {
  set_log_level(LogLevel::kError);
  Counts counts;
  crash_everywhere(
      save_on, [&](const FileImage& image, uint64_t) { expect_recovery(image, counts); }, kStride);
  std::cout << counts.images << " crash points in all, " << counts.whole << " with a checkpoint, "
            << counts.claimed << " with a part of its index\n";
  EXPECT_EQ(counts.claimed > 0, is_megatron());
  set_log_level(LogLevel::kWarning);
}

TEST_P(SaveByFilesCrashes, ARankThatDiesAtAnyCallIsCompletedByItselfOrAnybody) {
  set_log_level(LogLevel::kError);
  Counts counts;
  const uint64_t calls = save_on({})->calls();
  for (uint64_t at = 0; at < calls; at += kStride) {
    const auto inner = storage_of({});
    const auto disk = FaultDisk::create(inner, [&](const StorageCall& call) {
      return call.index == at ? FaultAction::die_after() : FaultAction::pass();
    });
    for (int rank = 0; rank < kRanks; ++rank) {
      SaveOptions options = by_files(rank, "the first token");
      options.by_files->wait = false;
      try {
        save(state_of(rank, 3), Location(disk->storage(rank)), options);
      } catch (const Error&) {
      }
    }
    SCOPED_TRACE("call " + std::to_string(at));
    expect_recovery(memory_image(*inner), counts);
    if (::testing::Test::HasFailure()) return;
  }
  std::cout << counts.images << " crash points in all, " << counts.whole << " with a checkpoint, "
            << counts.claimed << " with a part of its index\n";
  EXPECT_EQ(counts.claimed > 0, is_megatron());
  set_log_level(LogLevel::kWarning);
}

INSTANTIATE_TEST_SUITE_P(Dialects, SaveByFilesCrashes,
                         testing::Values("pytorch", "megatron", "pytorch_in_objects",
                                         "megatron_in_objects"),
                         [](const auto& dialect) { return dialect.param; });

}  // namespace tilestone::crash_points_by_files_test
