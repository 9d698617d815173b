// A rank fails: every rank ends with the same typed error, no incomplete save can be taken for a
// checkpoint, and a retry succeeds. Only cases that are not in the table of
// failing_ranks_matrix_test.cc.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>

#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/storage/fault_storage_testing.h"

namespace tilestone::failing_ranks_test {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;

constexpr int kRanks = 3;

SaveOptions saving(const Communicator& comm, double timeout = 60) {
  SaveOptions options;
  options.comm = comm;
  options.resources.buffer_bytes = 1u << 20;
  options.timeout = timeout;
  return options;
}

// The call that fails, and how.
struct Fault {
  int client;
  StorageOp op;
  std::string name;  // part of the name
  int error;
};

std::shared_ptr<FaultDisk> faulty(const std::shared_ptr<Storage>& inner, const Fault& fault) {
  return FaultDisk::create(inner, [fault](const StorageCall& call) {
    const bool hit = call.client == fault.client && call.op == fault.op &&
                     call.name.find(fault.name) != std::string_view::npos;
    return hit ? FaultAction::fail(fault.error) : FaultAction::pass();
  });
}

bool holds_checkpoint(const std::shared_ptr<Storage>& storage) {
  try {
    Checkpoint::open(Location(storage));
    return true;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotFound);
    return false;
  }
}

void expect_retry_works(const std::shared_ptr<Storage>& storage, bool overwrite = false) {
  run_ranks(kRanks, [&](Communicator comm) {
    SaveOptions options = saving(comm);
    options.overwrite = overwrite;
    save(row_state(comm, 50), Location(storage), options);
  });
  expect_rows(Location(storage), 50, kRanks);
  EXPECT_TRUE(Checkpoint::open(Location(storage)).verify().ok());
}

// All ranks save; returns what each rank threw.
std::vector<std::string> save_over(const std::shared_ptr<FaultDisk>& disk, bool overwrite = false) {
  return failures(kRanks, [&](Communicator comm) {
    SaveOptions options = saving(comm);
    options.overwrite = overwrite;
    save(row_state(comm, 1), Location(disk->storage(comm.rank())), options);
  });
}

TEST(FailingRank, ExceptionInAFactoryReachesEveryRank) {
  const auto storage = memory_storage();
  const auto texts = failures(kRanks, [&](Communicator comm) {
    StateDict state = row_state(comm, 1);
    if (comm.rank() == 2) {
      ShardedTensorFactory factory;
      factory.key = "swiglu";
      factory.data = counting(DType::kFloat32, {2});
      factory.build = [](const std::string&, const TensorView&, const ReplicaId&,
                         const std::optional<FlatRange>&) -> StateNode {
        throw std::runtime_error("no such half");
      };
      state["swiglu"] = factory;
    }
    save(state, Location(storage), saving(comm));
  });
  EXPECT_EQ(texts[2], "no such half");  // unchanged, as it was thrown
  for (const int rank : {0, 1}) {
    EXPECT_EQ(texts[static_cast<size_t>(rank)], "no such half (key swiglu) (rank 2)");
  }
  EXPECT_TRUE(storage->list().empty());
}

TEST(FailingRank, RanksThatDisagreeAreNamedOnEveryRank) {
  const auto storage = memory_storage();
  const auto texts = failures(kRanks, [&](Communicator comm) {
    StateDict state = row_state(comm, 1);
    if (comm.rank() == 2) state["p"] = counting(DType::kInt32, {3});
    save(state, Location(storage), saving(comm));
  });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("int32"), HasSubstr("int64"), HasSubstr("rank 2"),
                                HasSubstr("key p"))));
  EXPECT_FALSE(holds_checkpoint(storage));
  expect_retry_works(storage);
}

TEST(FailingRank, SyncThatFails) {
  const auto storage = memory_storage();
  const auto texts = save_over(faulty(storage, {2, StorageOp::kSync, ".distcp", EIO}));
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("Input/output error"), HasSubstr("rank 2"))));
  EXPECT_THAT(storage->list(), testing::IsEmpty());
  EXPECT_THAT(storage->list_directories(), testing::IsEmpty());
  expect_retry_works(storage);
}

TEST(FailingRank, CoordinatorCantMakeTheLock) {
  const auto storage = memory_storage();
  const auto texts = save_over(faulty(storage, {0, StorageOp::kLock, "", EACCES}));
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("Permission denied"), HasSubstr("rank 0"))));
  expect_retry_works(storage);
}

TEST(FailingRank, CoordinatorCantPublishTheManifest) {
  const auto storage = memory_storage();
  const auto texts = save_over(faulty(storage, {0, StorageOp::kRename, "manifest", EIO}));
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("Input/output error"), HasSubstr("rank 0"))));
  EXPECT_FALSE(holds_checkpoint(storage));
  EXPECT_THAT(storage->list(), testing::IsEmpty());
  expect_retry_works(storage);
}

TEST(FailingRank, CoordinatorCantPublishTheMetadata) {
  const auto storage = memory_storage();
  expect_retry_works(storage);
  const auto texts = save_over(faulty(storage, {0, StorageOp::kRename, "metadata", EIO}), true);
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("Input/output error"), HasSubstr("rank 0"))));
  expect_rows(Location(storage), 50, kRanks);
  expect_retry_works(storage, true);
}

TEST(FailingRank, ARankThatNeverSavesIsNamed) {
  const auto storage = memory_storage();
  const auto texts = failures(kRanks, [&](Communicator comm) {
    if (comm.rank() == 2) return;
    save(row_state(comm, 1), Location(storage), saving(comm));
  });
  for (int rank : {0, 1}) {
    EXPECT_THAT(texts[static_cast<size_t>(rank)],
                AllOf(HasSubstr("save at "), HasSubstr("rank 2 is gone")));
  }
}

TEST(FailingRank, ACoordinatorThatNeverSavesIsNamed) {
  const auto storage = memory_storage();
  const auto texts = failures(kRanks, [&](Communicator comm) {
    if (comm.rank() == 0) return;
    save(row_state(comm, 1), Location(storage), saving(comm));
  });
  for (int rank : {1, 2}) {
    EXPECT_THAT(texts[static_cast<size_t>(rank)],
                AllOf(HasSubstr("save at "), HasSubstr("rank 0 is gone")));
  }
}

TEST(FailingRank, ALoadThatFailsOnOneRankFailsOnAll) {
  const auto storage = memory_storage();
  expect_retry_works(storage);
  const auto disk = faulty(storage, {1, StorageOp::kRead, ".distcp", EIO});
  const auto texts = failures(kRanks, [&](Communicator comm) {
    LoadOptions options;
    options.comm = comm;
    options.resources.buffer_bytes = 1u << 20;
    load(row_template(comm), Location(disk->storage(comm.rank())), options);
  });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("Input/output error"), HasSubstr("rank 1"))));
}

}  // namespace tilestone::failing_ranks_test
