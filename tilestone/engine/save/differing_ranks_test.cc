// Ranks that disagree: other paths, other options, or other disks at the same path. Nothing is
// published or removed, and every rank gets an error that names the difference.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <functional>
#include <map>
#include <mutex>

#include "tilestone/base/error.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/save/async_save.h"
#include "tilestone/format/manifest.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::differing_ranks_test {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

SaveOptions saving(const Communicator& comm) {
  SaveOptions options;
  options.comm = comm;
  options.resources.buffer_bytes = 1u << 20;
  options.timeout = 60;
  return options;
}

FileImage saved(int ranks, int64_t first) {
  const auto storage = memory_storage();
  run_ranks(ranks, [&](Communicator comm) {
    save(row_state(comm, first), Location(storage), saving(comm));
  });
  return memory_image(*storage);
}

FileImage files_in(const std::string& folder) {
  const auto storage = posix_storage(folder);
  FileImage image;
  for (const std::string& name : storage->list()) {
    image.emplace(name, read_file(*storage, name, UINT64_MAX));
  }
  return image;
}

TEST(DifferingRanks, ValuesThatDifferAreLoggedOnceWithTheirKeysAndRanks) {
  const auto state = [](const Communicator& comm, const std::string& own) {
    StateDict out;
    out.entries().emplace_back("same", Value::list({1, "x"}));
    out.entries().emplace_back(own, Value::list({comm.rank() / 2, 7}));
    return out;
  };
  std::vector<std::string> said;
  set_log_sink([&](LogLevel, std::string_view text) { said.emplace_back(text); });
  for (const std::string& own : std::vector<std::string>{"seed", "seed", "loss"}) {
    const auto storage = memory_storage();
    run_ranks(4,
              [&](Communicator comm) { save(state(comm, own), Location(storage), saving(comm)); });
  }
  set_log_sink({});
  ASSERT_EQ(said.size(), 2u);
  EXPECT_THAT(said[0], HasSubstr("\"seed\" (ranks 0, 2 and 3 differ)"));
  EXPECT_THAT(said[1], HasSubstr("\"loss\" (ranks 0, 2 and 3 differ)"));
  EXPECT_THAT(said[0], Not(HasSubstr("\"same\"")));
}

TEST(DifferingRanks, PathsThatDifferAreNamedWithTheirRanks) {
  const TempDirectory folder;
  const std::string right = folder.path() + "/ckpt", typo = folder.path() + "/ckpt1";
  run_ranks(3, [&](Communicator comm) { save(row_state(comm, 1), right, saving(comm)); });
  const FileImage before = files_in(right);
  for (const int other : {0, 2}) {
    const auto path_of = [&](const Communicator& comm) {
      return Location(comm.rank() == other ? typo : right);
    };
    auto texts = failures(3, [&](Communicator comm) {
      SaveOptions options = saving(comm);
      options.overwrite = true;
      save(row_state(comm, 2), path_of(comm), options);
    });
    const auto expected = [&](const std::string& work) {
      return other == 0 ? "rank 0: " + work + typo + "; ranks 1 and 2: " + work + right
                        : "ranks 0 and 1: " + work + right + "; rank 2: " + work + typo;
    };
    EXPECT_THAT(texts, Each(HasSubstr(expected("save at "))));
    texts = failures(3, [&](Communicator comm) {
      LoadOptions options;
      options.comm = comm;
      load(row_template(comm), path_of(comm), options);
    });
    EXPECT_THAT(texts, Each(HasSubstr(expected("load at "))));
  }
  EXPECT_EQ(files_in(right), before);
  EXPECT_EQ(posix_storage(typo)->list(), std::vector<std::string>());
}

struct DifferingOption {
  std::string said;
  std::function<void(SaveOptions&)> set;
};

TEST(DifferingRanks, AnOptionOfASaveThatDiffersIsNamedWithItsValues) {
  const DifferingOption cases[] = {
      {"overwrite (ranks 0 and 2: False; rank 1: True)",
       [](SaveOptions& options) { options.overwrite = true; }},
      {"attributes (ranks 0 and 2: {}; rank 1: {\"iteration\": \"100\"})",
       [](SaveOptions& options) { options.attributes = {{"iteration", "100"}}; }},
      {"copies (ranks 0 and 2: None; rank 1: given)",
       [](SaveOptions& options) { options.copies = LocalCopies{{1}}; }},
  };
  for (const DifferingOption& option : cases) {
    const auto storage = memory_storage();
    const auto texts = failures(3, [&](Communicator comm) {
      SaveOptions options = saving(comm);
      if (comm.rank() == 1) option.set(options);
      save(row_state(comm, 1), Location(storage), options);
    });
    EXPECT_THAT(texts, Each(AllOf(HasSubstr("the ranks don't agree on " + option.said),
                                  HasSubstr("(rank 1)"))));
    EXPECT_THAT(storage->list(), IsEmpty());
  }
}

TEST(DifferingRanks, AnOptionOfALoadThatDiffersIsNamedWithItsValues) {
  const auto storage = memory_storage(saved(6, 1));
  const auto load_with = [&](const std::function<void(LoadOptions&, int)>& set) {
    return failures(6, [&](Communicator comm) {
      LoadOptions options;
      options.comm = comm;
      set(options, comm.rank());
      load(row_template(comm), Location(storage), options);
    });
  };
  EXPECT_THAT(
      load_with([](LoadOptions& options, int rank) {
        if (rank == 1) options.reading.two_phase = Reading::TwoPhase::kNever;
      }),
      Each(HasSubstr("the ranks don't agree on reading.two_phase (ranks 0, 2, 3, 4 and 1 more: "
                     "\"auto\"; rank 1: \"never\")")));
  EXPECT_THAT(
      load_with([](LoadOptions& options, int rank) { options.checks.checksums = rank > 4; }),
      Each(HasSubstr("the ranks don't agree on checks.checksums (ranks 0, 1, 2, 3 and 1 "
                     "more: False; rank 5: True)")));
  EXPECT_THAT(load_with([](LoadOptions& options, int rank) {
                options.cast = rank > 0;  // may differ between ranks, like threads and memory
                options.resources.threads = 1 + rank;
                options.resources.buffer_bytes = (1u << 20) * static_cast<uint64_t>(1 + rank);
              }),
              Each(std::string()));
}

// Rank 1 has another disk at the same path: two storages with the same description.
TEST(DifferingRanks, AnotherDiskAtTheSamePathIsFoundBeforeAnythingIsWrittenOrRemoved) {
  const FileImage before = saved(2, 50);
  const auto shared = memory_storage(before);
  const auto local = memory_storage({{"notes", to_bytes("mine")}});
  const auto texts = failures(2, [&](Communicator comm) {
    SaveOptions options = saving(comm);
    options.overwrite = true;
    save(row_state(comm, 1), Location(comm.rank() == 1 ? local : shared), options);
  });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("this rank sees another directory at memory"),
                                HasSubstr("(rank 1)"), HasSubstr("one file system"))));
  EXPECT_EQ(memory_image(*shared), before);
  EXPECT_EQ(memory_image(*local), (FileImage{{"notes", to_bytes("mine")}}));
}

// Rank 1 has begun nothing, and would wait for an outcome that never comes.
TEST(DifferingRanks, AnotherDiskAtTheSamePathIsFoundInTheCallOfAnAsynchronousSave) {
  const auto shared = memory_storage();
  for (const bool has_saves : {false, true}) {
    const auto local = memory_storage(has_saves ? saved(2, 50) : FileImage());
    const FileImage before = memory_image(*local);
    const auto texts = failures(2, [&](Communicator comm) {
      SaveOptions options = saving(comm);
      options.overwrite = true;
      async_save(row_state(comm, 1), Location(comm.rank() == 1 ? local : shared), options);
    });
    EXPECT_THAT(texts, Each(AllOf(HasSubstr("this rank sees another directory at memory"),
                                  HasSubstr("(rank 1)"), HasSubstr("one file system"))));
    EXPECT_EQ(memory_image(*local), before);
    EXPECT_FALSE(shared->stat(".metadata"));
  }
}

TEST(DifferingRanks, ALoadOnARankWithAnotherDiskSaysSo) {
  const auto shared = memory_storage(saved(2, 50));
  const auto local = memory_storage({{"notes", to_bytes("mine")}});
  const auto texts = failures(2, [&](Communicator comm) {
    LoadOptions options;
    options.comm = comm;
    load(row_template(comm), Location(comm.rank() == 1 ? local : shared), options);
  });
  EXPECT_THAT(texts,
              Each(AllOf(HasSubstr("(rank 1)"), HasSubstr("this rank sees another directory"),
                         Not(HasSubstr("replaced")))));
}

TEST(DifferingRanks, AFileOfAnotherSizeIsFoundBeforeAnythingIsPublished) {
  const auto storage = memory_storage();
  // Cut when the coordinator looks for the file.
  std::atomic<bool> cut = false;
  const auto shrinking = FaultDisk::create(storage, [&](const StorageCall& call) {
    if (call.op == StorageOp::kOpen && call.name.ends_with("__1_0.distcp") && !cut.exchange(true)) {
      const std::string name(call.name);
      storage->remove(name);
      put_file(*storage, name, to_bytes("short"));
    }
    return FaultAction::pass();
  });
  const auto texts = failures(2, [&](Communicator comm) {
    SaveOptions options = saving(comm);
    options.timeout = 3;
    save(row_state(comm, 1), Location(shrinking->storage(comm.rank())), options);
  });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("5 bytes in memory"), HasSubstr("(rank 1)"))));
  EXPECT_FALSE(storage->stat(".metadata"));
}

// A network file system may show the files of another host late.
TEST(DifferingRanks, FilesThatAreSeenLateAreWaitedFor) {
  constexpr int kRanks = 24;  // more files than one thread looks for
  const auto storage = memory_storage();
  std::mutex mutex;
  std::map<std::string, int> looks;
  const auto disk = FaultDisk::create(storage, [&](const StorageCall& call) {
    const bool data = call.op == StorageOp::kOpen && call.name.ends_with(".distcp");
    if (!data) return FaultAction::pass();
    const std::lock_guard lock(mutex);
    const int look = ++looks[std::string(call.name)];
    return look < 3 ? FaultAction::fail(ESTALE) : FaultAction::pass();
  });
  run_ranks(kRanks, [&](Communicator comm) {
    save(row_state(comm, 1), Location(disk->storage(comm.rank())), saving(comm));
  });
  EXPECT_EQ(looks.size(), static_cast<size_t>(kRanks));
  expect_rows(Location(storage), 1, kRanks);
}

// Leftovers of failed saves are not touched before the ranks agree, whatever they disagree on.
TEST(DifferingRanks, NothingIsRemovedBeforeTheRanksHaveAgreed) {
  FileImage before = saved(3, 50);
  const std::string dead = "01234567-89ab-4cde-8f01-23456789abcd";
  before[dead + "__0_0.distcp"] = to_bytes("left over");
  before[manifest_name(dead)] = to_bytes("left over");
  const auto storage = memory_storage(before);
  const auto texts = failures(3, [&](Communicator comm) {
    SaveOptions options = saving(comm);
    options.overwrite = true;
    StateDict state = row_state(comm, 1);
    if (comm.rank() == 2) state["p"] = counting(DType::kInt32, {3});
    save(state, Location(storage), options);
  });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("int32"), HasSubstr("key p"))));
  EXPECT_EQ(memory_image(*storage), before);
}

}  // namespace tilestone::differing_ranks_test
