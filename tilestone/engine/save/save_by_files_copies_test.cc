// Local copies in saves without a communicator, with and without a session.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>

#include "tilestone/base/error.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/save/save_steps_testing.h"
#include "tilestone/engine/session.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/state/metadata.h"
#include "tilestone/storage/memory_storage_testing.h"

namespace tilestone::save_by_files_copies_test {

constexpr int kRanks = 2;

SaveOptions copying(int rank) {
  SaveOptions options = by_files(rank, kRanks);
  options.copies.emplace();
  options.copies->group = {0, 1};
  return options;
}

// "all" is declared to be on both ranks.
StateDict state_of(int rank) {
  StateDict state = row_state(rank, kRanks);
  ShardedTensor all =
      ShardedTensor::from_rank_offsets("all", counting(DType::kInt64, {5}), {}, {rank});
  all.holders = {0, 1};
  state["all"] = all;
  return state;
}

size_t object_copies(const Checkpoint& checkpoint) {
  size_t copies = 0;
  for (const StoredObject& object : checkpoint.metadata().objects) copies += object.copies.size();
  return copies;
}

TEST(SaveByFilesCopies, TheCommonStateOfMegatronCoreIsInFilesOfTheIndexAndNotCopied) {
  using Differing = Checks::Differing;
  for (const Differing differing : {Differing::kIgnore, Differing::kWarn, Differing::kError}) {
    const Location location(memory_storage());
    uint64_t copies = 0;
    for (int rank = 0; rank < kRanks; ++rank) {
      SaveOptions options = copying(rank);
      options.dialect = megatron_dialect();
      options.checks.common_differs = differing;
      copies += save(state_of(rank), location, options).copies;
    }
    EXPECT_EQ(copies, 1u);  // of "all"
    const Checkpoint checkpoint = Checkpoint::open(location);
    EXPECT_EQ(checkpoint.metadata().copies.size(), 1u);
    EXPECT_EQ(object_copies(checkpoint), 0u);
    EXPECT_TRUE(checkpoint.verify().ok());
  }
}

TEST(SaveByFilesCopies, ObjectsOfOtherDialectsAreCopiedWhetherTheyAreComparedOrNot) {
  for (const auto differing : {Checks::Differing::kIgnore, Checks::Differing::kWarn}) {
    const Location location(memory_storage());
    for (int rank = 0; rank < kRanks; ++rank) {
      SaveOptions options = copying(rank);
      options.checks.common_differs = differing;
      save(state_of(rank), location, options);
    }
    EXPECT_EQ(object_copies(Checkpoint::open(location)), 1u);  // of "step"
  }
}

TEST(SaveByFilesCopies, ASessionsKeptPlanIsNoneOfASaveWithAnotherGroup) {
  Session session(1, kRanks, kToken);
  const auto saved = [&](const SaveOptions& options) {
    const Location location(memory_storage());
    SaveOptions of_rank_0 = by_files(0, kRanks);
    of_rank_0.checks.common_differs = options.checks.common_differs;
    save(state_of(0), location, of_rank_0);
    return begin_save(session, state_of(1), location, options);
  };
  const auto copied = [&](const SaveOptions& options) {
    return saved(options).write().report().publish().copies;
  };
  EXPECT_EQ(copied(by_files(1, kRanks)), 0u);
  SaveOptions without_group = copying(1);
  without_group.copies->group.clear();
  for (int tries = 0; tries < 2; ++tries) {
    try {
      saved(without_group);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
      EXPECT_EQ(error.rank(), 1);
    }
  }
  const uint64_t copies = copied(copying(1));
  EXPECT_GT(copies, 0u);
  EXPECT_EQ(copied(copying(1)), copies);
  SaveOptions ignoring = copying(1);
  ignoring.checks.common_differs = Checks::Differing::kIgnore;
  EXPECT_EQ(copied(ignoring), copies);
}

}  // namespace tilestone::save_by_files_copies_test
