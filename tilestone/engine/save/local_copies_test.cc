// A rank's copies of what another rank writes, in its own data file: what a save writes, and where
// loads read.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/format/data_file_name.h"
#include "tilestone/format/zarr/zarr.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"

namespace tilestone::local_copies_test {

using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using TwoPhase = Reading::TwoPhase;

constexpr int64_t kRow = 32768;  // float32: large enough to be read alone
constexpr int64_t kNorm = 1024;

enum class Way { kExchange, kFiles };
constexpr Way kWays[] = {Way::kExchange, Way::kFiles};

// The ranks of one tensor-parallel group: first, first + 1, ...
struct Group {
  int first = 0;
  int size = 1;
  int replicas = 1;  // data-parallel replicas
};

std::vector<int> ranks_of(const Group& group) {
  std::vector<int> ranks;
  for (int i = 0; i < group.size; ++i) ranks.push_back(group.first + i);
  return ranks;
}

// "mlp" has a row on each rank of a group; two norms and the embedding are on all ranks.
StateDict state_of(int rank, const Group& group, bool with_data = true) {
  const int tp = rank - group.first;
  const int dp = group.first / group.size;
  const auto data = [&](const Dims& shape, int64_t first) {
    return with_data ? counting(DType::kFloat32, shape, first)
                     : TensorView::without_data(DType::kFloat32, shape);
  };
  StateDict state;
  ShardedTensor mlp = ShardedTensor::from_rank_offsets("mlp", data({1, kRow}, kRow * tp),
                                                       {{0, tp, group.size}}, {dp});
  for (int i = 0; i < group.replicas; ++i) mlp.holders.push_back(tp + i * group.size);
  state["mlp"] = mlp;
  for (const char* key : {"emb", "norm0", "norm1"}) {
    const int64_t size = key[0] == 'e' ? kRow : kNorm;
    ShardedTensor all = ShardedTensor::from_rank_offsets(key, data({size}, std::string(key).back()),
                                                         {}, {tp + dp * group.size});
    for (int i = 0; i < group.size * group.replicas; ++i) all.holders.push_back(i);
    state[key] = all;
  }
  return state;
}

uint64_t bytes_of(const StateDict& state) {
  uint64_t bytes = 0;
  for (const char* key : {"mlp", "emb", "norm0", "norm1"}) {
    bytes += state.get<ShardedTensor>(key).data.bytes();
  }
  return bytes;
}

SaveOptions saving(Way way, const Communicator& comm, int world, bool copies, const Group& group) {
  SaveOptions options;
  options.resources.buffer_bytes = 1u << 20;
  options.resources.threads = 1;
  options.timeout = 60;
  if (way == Way::kFiles) {
    options.by_files = ByFiles{comm.rank(), world, "a run of this test"};
  } else {
    options.comm = comm;
  }
  if (!copies) return options;
  options.copies.emplace();
  options.copies->group = ranks_of(group);
  return options;
}

FileImage saved(Way way, int ranks, bool copies, std::vector<SaveResult>* results = nullptr) {
  const auto storage = memory_storage();
  std::mutex mutex;
  if (results != nullptr) results->resize(static_cast<size_t>(ranks));
  run_ranks(ranks, [&](Communicator comm) {
    const Group group{0, ranks, 1};
    const SaveResult result = save(state_of(comm.rank(), group), Location(storage),
                                   saving(way, comm, ranks, copies, group));
    std::lock_guard lock(mutex);
    if (results != nullptr) (*results)[static_cast<size_t>(comm.rank())] = result;
  });
  return memory_image(*storage);
}

// The data files that each rank of a load opens and reads, and the ranks that open index files.
struct Traffic {
  std::mutex mutex;
  std::vector<std::set<std::string>> files;
  std::vector<uint64_t> bytes;
  std::set<int> index_readers;

  explicit Traffic(int ranks) : files(static_cast<size_t>(ranks)), bytes(files.size(), 0) {}
  void note(const StorageCall& call) {
    const std::lock_guard lock(mutex);
    const auto rank = static_cast<size_t>(call.client);
    const bool data = call.name.ends_with(".distcp");
    if (call.op == StorageOp::kOpen && data) files[rank].insert(std::string(call.name));
    if (call.op == StorageOp::kOpen && !data) index_readers.insert(call.client);
    if (call.op == StorageOp::kRead && data) bytes[rank] += call.size;
  }
  size_t opened() const {
    size_t sum = 0;
    for (const auto& of_rank : files) sum += of_rank.size();
    return sum;
  }
};

// Loads in tensor-parallel groups of `tp` ranks, and compares all elements.
void expect_loads(const FileImage& image, int ranks, int tp, TwoPhase mode, Traffic& traffic) {
  const auto disk = FaultDisk::create(memory_storage(image), [&](const StorageCall& call) {
    traffic.note(call);
    return FaultAction::pass();
  });
  run_ranks(ranks, [&](Communicator comm) {
    const Group group{comm.rank() / tp * tp, tp, ranks / tp};
    LoadOptions options;
    options.comm = comm;
    options.resources.buffer_bytes = 4u << 20;
    options.resources.threads = 1;
    options.timeout = 60;
    options.reading.two_phase = mode;
    StateDict wanted;
    const StateDict asked = state_of(comm.rank(), group, false);
    const StateDict expected = state_of(comm.rank(), group);
    for (const char* key : {"emb", "norm0", "norm1"}) wanted[key] = asked.at(key);
    // This rank's share of the rows of "mlp", which has as many rows as the save had ranks.
    const int64_t rows =
        Checkpoint::open(Location(memory_storage(image))).metadata().find_tensor("mlp")->shape[0];
    wanted["mlp"] = ShardedTensor::from_rank_offsets(
        "mlp", TensorView::without_data(DType::kFloat32, {rows / tp, kRow}),
        {{0, comm.rank() % tp, tp}});
    const StateDict loaded = load(wanted, Location(disk->storage(comm.rank())), options);
    const auto data_of = [&](const char* key) {
      return elements(loaded.get<ShardedTensor>(key).data);
    };
    for (const char* key : {"emb", "norm0", "norm1"}) {
      EXPECT_EQ(data_of(key), elements(expected.get<ShardedTensor>(key).data)) << key;
    }
    const Dims& shape = loaded.get<ShardedTensor>("mlp").data.shape;
    EXPECT_EQ(data_of("mlp"),
              elements(counting(DType::kFloat32, shape, comm.rank() % tp * shape[0] * kRow)));
  });
}

TEST(LocalCopies, ARestartInTheSameLayoutOpensItsOwnFileAloneAndReadsExactlyItsBytes) {
  constexpr int kRanks = 8;
  const uint64_t wanted = bytes_of(state_of(0, {0, kRanks, 1}));
  constexpr uint64_t kGaps = 2u * 3072u;  // headers between small items that are read together
  for (const Way way : kWays) {
    for (const bool copies : {false, true}) {
      SCOPED_TRACE(testing::Message() << "way " << static_cast<int>(way) << ", copies " << copies);
      const FileImage image = saved(way, kRanks, copies);
      for (const TwoPhase mode : {TwoPhase::kNever, TwoPhase::kAlways}) {
        Traffic traffic(kRanks);
        expect_loads(image, kRanks, kRanks, mode, traffic);
        EXPECT_THAT(traffic.index_readers, ElementsAre(0));  // one rank reads for all
        if (!copies) {
          EXPECT_GT(traffic.opened(), static_cast<size_t>(kRanks));
          continue;
        }
        for (int rank = 0; rank < kRanks; ++rank) {
          const auto r = static_cast<size_t>(rank);
          ASSERT_EQ(traffic.files[r].size(), 1u) << rank;
          EXPECT_THAT(*traffic.files[r].begin(), HasSubstr("__" + std::to_string(rank) + "_"));
          EXPECT_GE(traffic.bytes[r], wanted);
          EXPECT_LE(traffic.bytes[r], wanted + kGaps);
        }
      }
    }
  }
}

TEST(LocalCopies, ALoadInAnotherLayoutFindsTheSameElements) {
  const FileImage image = saved(Way::kExchange, 4, true);
  for (const int ranks : {1, 2, 4}) {
    for (const int tp : {1, 2}) {
      if (tp > ranks) continue;
      for (const TwoPhase mode : {TwoPhase::kNever, TwoPhase::kAlways}) {
        SCOPED_TRACE(testing::Message() << ranks << " ranks, tp " << tp);
        Traffic traffic(ranks);
        expect_loads(image, ranks, tp, mode, traffic);
      }
    }
  }
}

TEST(LocalCopies, WhatTheyCostIsSaidAfterwardsAndStaysWithinTheBudget) {
  for (const Way way : kWays) {
    for (const uint64_t budget : {~uint64_t{0}, uint64_t{kNorm * 4}, uint64_t{0}}) {
      SCOPED_TRACE(testing::Message() << "way " << static_cast<int>(way) << ", " << budget);
      const auto storage = memory_storage();
      std::mutex mutex;
      uint64_t copies = 0, bytes = 0;
      run_ranks(2, [&](Communicator comm) {
        const Group group{0, 2, 1};
        SaveOptions options = saving(way, comm, 2, true, group);
        options.copies->max_bytes = budget;
        const StateDict state = state_of(comm.rank(), group);
        const SaveResult result = save(state, Location(storage), options);
        EXPECT_LE(result.copy_bytes, budget);
        const std::lock_guard lock(mutex);
        copies += result.copies;
        bytes += result.copy_bytes;
      });
      const Checkpoint checkpoint = Checkpoint::open(Location(storage));
      EXPECT_TRUE(checkpoint.verify().ok());
      EXPECT_EQ(checkpoint.metadata().copies.size(), copies);
      if (budget == 0) {
        EXPECT_EQ(copies, 0u);
      } else if (budget == kNorm * 4) {
        EXPECT_EQ(bytes, copies * kNorm * 4);
        EXPECT_GT(copies, 0u);
      } else {
        EXPECT_EQ(copies, 3u);
        EXPECT_EQ(bytes, uint64_t{(kRow + 2 * kNorm) * 4});
      }
    }
  }
}

TEST(LocalCopies, ARankThatHasReportedBeforeIsStartedAgainAndSaysThatItHasCopiedNothing) {
  const auto storage = memory_storage();
  const Group group{0, 2, 1};
  for (int rank = 0; rank < 2; ++rank) {
    SaveOptions options;
    options.by_files = ByFiles{rank, 2, "a run of this test", 0, false};
    options.copies.emplace();
    options.copies->group = {0, 1};
    const SaveResult first = save(state_of(rank, group), Location(storage), options);
    EXPECT_GT(first.bytes_written, 0u);
    const SaveResult again = save(state_of(rank, group), Location(storage), options);
    EXPECT_EQ(again.bytes_written, 0u);
    EXPECT_EQ(again.copies, 0u);
    EXPECT_EQ(again.copy_bytes, 0u);
  }
  EXPECT_FALSE(Checkpoint::open(Location(storage)).metadata().copies.empty());
}

TEST(LocalCopies, RanksOutsideTheGroupCopyNothingOfOneAnother) {
  const auto storage = memory_storage();
  std::atomic<uint64_t> copies = 0;
  run_ranks(4, [&](Communicator comm) {
    const Group group{comm.rank() / 2 * 2, 2, 2};
    copies += save(state_of(comm.rank(), group), Location(storage),
                   saving(Way::kExchange, comm, 4, true, group))
                  .copies;
  });
  const Metadata metadata = Checkpoint::open(Location(storage)).metadata();
  EXPECT_EQ(metadata.copies.size(), copies);
  EXPECT_GT(copies, 0u);
  const auto rank_of = [&](const ItemLocation& at) {
    return parse_data_file_name(metadata.files[at.file])->rank;
  };
  for (const StoredCopy& copy : metadata.copies) {
    EXPECT_NE(metadata.tensors[copy.tensor].key, "mlp");  // replicated only over data parallelism
    const int writer = rank_of(metadata.place(copy.tensor, copy.chunk, kNoCopy));
    EXPECT_EQ(rank_of(copy.at) / 2, writer / 2);
  }
}

// What each of two ranks throws when it saves after `change` has modified its options and state.
std::vector<std::string> refusals(
    const std::function<void(int rank, SaveOptions&, StateDict&)>& change) {
  const auto storage = memory_storage();
  const std::vector<std::string> texts = failures(2, [&](Communicator comm) {
    const Group group{0, 2, 1};
    SaveOptions options = saving(Way::kExchange, comm, 2, true, group);
    StateDict state = state_of(comm.rank(), group);
    change(comm.rank(), options, state);
    save(state, Location(storage), options);
  });
  EXPECT_FALSE(storage->stat(".metadata"));
  return texts;
}

TEST(LocalCopies, WhatASaveCannotCopyItRefusesOnAllRanks) {
  EXPECT_THAT(refusals([](int rank, SaveOptions& options, StateDict&) {
                if (rank == 1) options.copies->group.clear();
              }),
              Each(HasSubstr("copies.group is empty")));
  EXPECT_THAT(refusals([](int rank, SaveOptions& options, StateDict&) {
                if (rank == 1) options.copies->group = {0};
              }),
              Each(HasSubstr("copies.group of rank 1 does not include")));
  EXPECT_THAT(refusals([](int rank, SaveOptions& options, StateDict&) {
                if (rank == 0) return;
                options.copies.reset();
              }),
              Each(HasSubstr("the ranks don't agree on copies")));
  EXPECT_THAT(
      refusals([](int, SaveOptions& options, StateDict&) { options.format = zarr_format(); }),
      Each(HasSubstr("each chunk in its own file")));
  EXPECT_THAT(refusals([](int rank, SaveOptions&, StateDict& state) {
                if (rank == 1) *state.get<ShardedTensor>("emb").data.data ^= std::byte{1};
              }),
              Each(testing::AllOf(HasSubstr("emb"), HasSubstr("data that differs between ranks"))));
}

// ---- Damage

// Flips a bit in the middle of an item.
void damage(FileImage& image, const Metadata& metadata, const ItemLocation& at) {
  image[metadata.files[at.file]][at.offset + at.length / 2] ^= std::byte{4};
}

TEST(DamagedCopies, AChunkIsReadFromWhereItIsIntactWithAWarningOfKeyAndFile) {
  const FileImage image = saved(Way::kExchange, 2, true);
  const Metadata metadata = Checkpoint::open(Location(memory_storage(image))).metadata();
  const auto emb = static_cast<uint32_t>(metadata.find_tensor("emb") - metadata.tensors.data());
  const auto copy =
      static_cast<uint32_t>(metadata.copies_of(emb, 0).data() - metadata.copies.data());
  for (const uint32_t damaged : {kNoCopy, copy}) {
    FileImage one = image;
    damage(one, metadata, metadata.place(emb, 0, damaged));
    const std::string& file = metadata.files[metadata.place(emb, 0, damaged).file];
    for (const TwoPhase mode : {TwoPhase::kNever, TwoPhase::kAlways}) {
      const LoggedWarnings logged;
      Traffic traffic(2);
      expect_loads(one, 2, 2, mode, traffic);
      EXPECT_THAT(logged.texts(),
                  testing::Contains(testing::AllOf(HasSubstr("\"emb\""), HasSubstr(file))));
    }
    const LoggedWarnings logged;
    EXPECT_EQ(elements(Checkpoint::open(Location(memory_storage(one))).read("emb")),
              elements(Checkpoint::open(Location(memory_storage(image))).read("emb")));
    EXPECT_EQ(logged.texts().size(), damaged == kNoCopy ? 1u : 0u);
    const auto found = Checkpoint::open(Location(memory_storage(one))).verify().damages;
    ASSERT_EQ(found.size(), 1u);
    EXPECT_EQ(found[0].file, file);
    EXPECT_EQ(found[0].key, "emb");
    EXPECT_EQ(found[0].copy, damaged != kNoCopy);
    const uint32_t other = damaged == kNoCopy ? copy : kNoCopy;
    EXPECT_EQ(found[0].intact_in, metadata.files[metadata.place(emb, 0, other).file]);
  }
}

// If the halves were read from two places, no read would be checked.
TEST(DamagedCopies, AChunkThatARankWantsInPiecesIsReadFromOnePlaceAndChecked) {
  const FileImage image = saved(Way::kExchange, 2, true);
  const Metadata metadata = Checkpoint::open(Location(memory_storage(image))).metadata();
  const auto emb = static_cast<uint32_t>(metadata.find_tensor("emb") - metadata.tensors.data());
  const auto copy =
      static_cast<uint32_t>(metadata.copies_of(emb, 0).data() - metadata.copies.data());
  const LogLevel before = set_log_level(LogLevel::kOff);  // hides the warnings about damage
  for (const uint32_t damaged : {kNoCopy, copy}) {
    FileImage one = image;
    const ItemLocation& at = metadata.place(emb, 0, damaged);
    for (const uint64_t part : {3, 5}) {  // one in each half
      one[metadata.files[at.file]][at.offset + at.length * part / 8] ^= std::byte{4};
    }
    StateDict wanted;
    for (int half = 0; half < 2; ++half) {
      wanted["half " + std::to_string(half)] = ShardedTensor::from_rank_offsets(
          "emb", TensorView::without_data(DType::kFloat32, {kRow / 2}), {{0, half, 2}});
    }
    LoadOptions options;
    options.resources.threads = 1;
    const StateDict loaded = load(wanted, Location(memory_storage(one)), options);
    for (int half = 0; half < 2; ++half) {
      EXPECT_EQ(elements(loaded.get<ShardedTensor>("half " + std::to_string(half)).data),
                elements(counting(DType::kFloat32, {kRow / 2}, 'b' + half * kRow / 2)))
          << "half " << half;
    }
  }
  set_log_level(before);
}

TEST(DamagedCopies, RepairWritesThemAnewByteForByteOrLeavesTheFile) {
  const FileImage image = saved(Way::kExchange, 2, true);
  const Metadata metadata = Checkpoint::open(Location(memory_storage(image))).metadata();
  const auto emb = static_cast<uint32_t>(metadata.find_tensor("emb") - metadata.tensors.data());
  const auto place = [&](size_t i) {
    return i == 0 ? metadata.place(emb, 0, kNoCopy) : metadata.copies_of(emb, 0)[0].at;
  };
  for (const size_t damaged : {0, 1}) {
    FileImage one = image;
    damage(one, metadata, place(damaged));
    const auto storage = memory_storage(one);
    const RepairReport report = repair(Location(storage));
    ASSERT_EQ(report.mended.size(), 1u);
    EXPECT_EQ(report.mended[0].key, "emb");
    EXPECT_TRUE(report.now.ok());
    FileImage after = memory_image(*storage);
    after.erase(".tilestone/lock");
    FileImage before = image;
    before.erase(".tilestone/lock");
    EXPECT_EQ(after, before);
  }
  FileImage both = image;
  damage(both, metadata, place(0));
  damage(both, metadata, place(1));
  const auto storage = memory_storage(both);
  const RepairReport report = repair(Location(storage));
  EXPECT_TRUE(report.mended.empty());
  EXPECT_EQ(report.now.damages.size(), 2u);
  EXPECT_EQ(memory_image(*storage).at(metadata.files[place(0).file]),
            both.at(metadata.files[place(0).file]));
}

TEST(DamagedCopies, WhatOneRankReadsForOthersIsReadFromTheCopyByAllOfThem) {
  const FileImage image = saved(Way::kExchange, 2, true);
  const Metadata metadata = Checkpoint::open(Location(memory_storage(image))).metadata();
  const auto emb = static_cast<uint32_t>(metadata.find_tensor("emb") - metadata.tensors.data());
  FileImage one = image;
  damage(one, metadata, metadata.place(emb, 0, kNoCopy));
  {
    const LoggedWarnings logged;
    Traffic traffic(4);
    expect_loads(one, 4, 2, TwoPhase::kAlways, traffic);
    EXPECT_THAT(logged.texts(), testing::Contains(HasSubstr("\"emb\"")));
  }
  damage(one, metadata, metadata.copies_of(emb, 0)[0].at);
  set_log_level(LogLevel::kOff);
  for (const TwoPhase mode : {TwoPhase::kNever, TwoPhase::kAlways}) {
    const auto texts = failures(4, [&](Communicator comm) {
      LoadOptions options;
      options.comm = comm;
      options.reading.two_phase = mode;
      options.timeout = 60;
      StateDict wanted;
      wanted["emb"] = TensorView::without_data(DType::kFloat32, {kRow});
      load(wanted, Location(memory_storage(one)), options);
    });
    EXPECT_THAT(texts, Each(testing::AllOf(HasSubstr("emb"), HasSubstr("damaged"))));
  }
  set_log_level(LogLevel::kWarning);
}

}  // namespace tilestone::local_copies_test
