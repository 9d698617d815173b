// Saves without a communicator with ranks, disks and users that misbehave.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <random>

#include "tilestone/base/error.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/open/attempt_files_internal.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"
#include "tilestone/storage/posix_storage.h"

namespace tilestone::save_by_files_hostile_test {

SaveResult save_rank(const Location& location, int rank, int ranks, int64_t first,
                     const std::string& token = kToken) {
  return save(row_state(rank, ranks, first), location, by_files(rank, ranks, token));
}

// The error that `work` throws; nullopt if it returns.
std::optional<Error> thrown(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

#define EXPECT_THROWS(work, wanted, text)                                                 \
  do {                                                                                    \
    const auto error = thrown([&] { work; });                                             \
    ASSERT_TRUE(error) << "not refused";                                                  \
    EXPECT_EQ(error->code(), wanted) << error->what();                                    \
    EXPECT_NE(std::string(error->what()).find(text), std::string::npos) << error->what(); \
  } while (false)

void expect_whole(const Location& location, int64_t first, int ranks) {
  expect_rows(location, first, ranks);
  EXPECT_TRUE(Checkpoint::open(location).verify().ok());
}

// The rank stalls after its receipt was renamed. Meanwhile another process publishes and removes
// the receipt's directory.
TEST(SaveByFilesHostile, ARankWhoseReceiptIsPublishedBeforeItsCallEndsKeepsItsFiles) {
  const auto inner = memory_storage();
  bool reported = false;
  const auto disk = FaultDisk::create(inner, [&](const StorageCall& call) {
    if (call.client != 1) return FaultAction::pass();
    if (call.op == StorageOp::kRename && call.to.ends_with("1.report")) {
      reported = true;
    } else if (std::exchange(reported, false)) {
      EXPECT_TRUE(save_rank(Location(inner), 0, 2, 3).published);
    }
    return FaultAction::pass();
  });
  EXPECT_FALSE(save_rank(Location(disk->storage(0)), 0, 2, 3).published);
  EXPECT_TRUE(save_rank(Location(disk->storage(1)), 1, 2, 3).published);
  expect_whole(Location(inner), 3, 2);
}

TEST(SaveByFilesHostile, ARankThatStallsAtAnyCallFindsWhatItsTwinHasPublished) {
  bool stalled = true;
  for (uint64_t at = 0; stalled; ++at) {
    SCOPED_TRACE("call " + std::to_string(at));
    const auto inner = memory_storage();
    uint64_t calls = 0;
    const auto disk = FaultDisk::create(inner, [&](const StorageCall&) {
      if (calls++ != at) return FaultAction::pass();
      for (const int rank : {0, 1}) save_rank(Location(inner), rank, 2, 3);
      return FaultAction::pass();
    });
    const bool published = save_rank(Location(disk->storage(1)), 1, 2, 3).published;
    stalled = calls > at;
    ASSERT_EQ(published, stalled);  // alone, its files are no checkpoint
    if (!stalled) return;
    expect_whole(Location(inner), 3, 2);
    EXPECT_TRUE(find_unpublished(Location(inner)).empty());
    for (const Leftover& left : find_leftovers(Location(inner))) ADD_FAILURE() << left.name;
    EXPECT_EQ(inner->list_directories(".tilestone/"), std::vector<std::string>());
    if (HasFailure()) return;
  }
}

// Meanwhile its twin publishes, and another save replaces the checkpoint as a whole.
TEST(SaveByFilesHostile, ARankThatStallsAtAnyCallPutsNothingIntoALaterCheckpoint) {
  SaveOptions options[2] = {by_files(0, 2), by_files(1, 2)};
  for (SaveOptions& each : options) {
    each.dialect = megatron_dialect();
    each.timeout = 1;
  }
  const auto rank = [&](int number, const std::shared_ptr<Storage>& at) {
    save(row_state(number, 2, 3), Location(at->child("ckpt")), options[number]);
  };
  bool stalled = true;
  for (uint64_t at = 0; stalled; ++at) {
    SCOPED_TRACE("call " + std::to_string(at));
    const auto parent = memory_storage();
    uint64_t calls = 0;
    const auto disk = FaultDisk::create(parent, [&](const StorageCall&) {
      if (calls++ != at) return FaultAction::pass();
      for (const int number : {0, 1}) rank(number, parent);
      save(row_state(solo(), 500), Location(parent->child("ckpt")), {.overwrite = true});
      return FaultAction::pass();
    });
    rank(0, parent);
    const auto error = thrown([&] { rank(1, disk->storage(1)); });
    stalled = calls > at;
    if (!stalled) return;
    expect_whole(Location(parent->child("ckpt")), 500, 1);
    if (HasFailure()) return;
  }
}

// Meanwhile its twin publishes, and the step is removed.
TEST(SaveByFilesHostile, ARankThatStallsAtAnyCallBringsNoRemovedCheckpointBack) {
  const auto rank = [](int number, const Location& location) {
    SaveOptions options = by_files(number, 2);
    options.timeout = 1;  // of who waits for what the stalled rank has claimed
    save(row_state(number, 2, 3), location, options);
  };
  for (const bool objects : {false, true}) {
    bool stalled = true;
    for (uint64_t at = 0; stalled; ++at) {
      SCOPED_TRACE("call " + std::to_string(at));
      const auto inner = objects ? memory_objects() : memory_storage();
      uint64_t calls = 0;
      const auto disk = FaultDisk::create(inner, [&](const StorageCall&) {
        if (calls++ != at) return FaultAction::pass();
        for (const int number : {0, 1}) rank(number, Location(inner));
        inner->remove(inner->list());
        for (const std::string& name : inner->list_directories()) inner->remove_tree(name);
        return FaultAction::pass();
      });
      rank(0, Location(inner));
      thrown([&] { rank(1, Location(disk->storage(1))); });
      stalled = calls > at;
      EXPECT_EQ(inner->stat(".metadata").has_value(), !stalled);
      if (HasFailure()) return;
    }
  }
}

TEST(SaveByFilesHostile, AReceiptThatDoesNotCountIsNotCountedAsWritten) {
  const auto inner = memory_storage();
  bool twin = false;
  const auto disk = FaultDisk::create(inner, [&](const StorageCall& call) {
    if (call.op == StorageOp::kRename && call.to.ends_with("1.report") && !twin) {
      twin = true;
      EXPECT_GT(save_rank(Location(inner), 1, 2, 3).bytes_written, 0u);
    }
    return FaultAction::pass();
  });
  const LoggedWarnings logged;
  const SaveResult lost = save_rank(Location(disk->storage()), 1, 2, 3);
  EXPECT_TRUE(twin);
  EXPECT_EQ(lost.bytes_written, 0u);
  EXPECT_EQ(lost.items_written, 0u);
  const std::vector<std::string> texts = logged.texts();
  EXPECT_EQ(std::count_if(texts.begin(), texts.end(),
                          [](const std::string& text) {
                            return text.find("another process has reported as this rank") !=
                                   std::string::npos;
                          }),
            1);
  save_rank(Location(inner), 0, 2, 3);
  expect_whole(Location(inner), 3, 2);
}

// As on a network file system whose client repeats a request: the second answer is wrong.
TEST(SaveByFilesHostile, ARankWhoseReceiptIsTakenForAnothersKeepsItsFiles) {
  const auto inner = memory_storage();
  bool again = false;
  const auto disk = FaultDisk::create(inner, [&](const StorageCall& call) {
    if (call.op == StorageOp::kRename && call.to.ends_with("1.report") && !again) {
      again = true;
      const Bytes bytes = read_file(*inner, std::string(call.name), UINT64_MAX);
      inner->publish(std::string(call.to), ".tilestone/x.tmp", bytes, false, Deadline::never());
    }
    return FaultAction::pass();
  });
  save_rank(Location(disk->storage(0)), 0, 2, 3);
  EXPECT_TRUE(save_rank(Location(disk->storage(1)), 1, 2, 3).published);
  EXPECT_TRUE(again);
  expect_whole(Location(inner), 3, 2);
}

TEST(SaveByFilesHostile, AReplacedSaveIsNotReportedAsPublishedWhenItsTokenComesAgain) {
  const Location location(memory_storage());
  EXPECT_TRUE(save_rank(location, 0, 1, 3).published);
  EXPECT_TRUE(save_rank(location, 0, 1, 3).published);
  SaveOptions over;
  over.overwrite = true;
  save(row_state(0, 1, 4), location, over);
  EXPECT_THROWS(save_rank(location, 0, 1, 3), ErrorCode::kAlreadyExists, "does not exist");
  expect_whole(location, 4, 1);
}

TEST(SaveByFilesHostile, TheLoserOfTwoRunsIsNeverReportedAsPublished) {
  const Location location(memory_storage());
  save_rank(location, 0, 2, 3, "the first run");
  for (const int rank : {0, 1}) save_rank(location, rank, 2, 4, "the second run");
  ASSERT_EQ(find_unpublished(location).size(), 1u);
  EXPECT_FALSE(find_unpublished(location)[0].complete());
  EXPECT_NE(find_unpublished(location)[0].text.find("1 of its 2 ranks has not written (rank 1)"),
            std::string::npos)
      << find_unpublished(location)[0].text;
  EXPECT_THROWS(save_rank(location, 1, 2, 3, "the first run"), ErrorCode::kAlreadyExists,
                "another checkpoint was published");
  ASSERT_EQ(find_unpublished(location).size(), 1u);
  EXPECT_NE(find_unpublished(location)[0].text.find("has failed: another checkpoint was published"),
            std::string::npos)
      << find_unpublished(location)[0].text;
  EXPECT_THROWS(publish(location), ErrorCode::kAlreadyExists, "another checkpoint was published");
  EXPECT_FALSE(remove_leftovers(location).empty());
  for (const int rank : {0, 1}) {
    EXPECT_THROWS(save_rank(location, rank, 2, 3, "the first run"), ErrorCode::kAlreadyExists,
                  "has failed");
  }
  EXPECT_TRUE(find_unpublished(location).empty());
  expect_whole(location, 4, 2);
}

TEST(SaveByFilesHostile, WhoPublishesASaveWhoseRanksContradictEachOtherEndsIt) {
  const auto storage = memory_storage();
  const Location location(storage);
  save_rank(location, 0, 2, 3);
  EXPECT_THROWS(save_rank(location, 1, 2, 4), ErrorCode::kMismatch, "p");
  storage->remove(engine::outcome_name(engine::save_id_of(kToken, 0)));  // as if rank 1 had died
  EXPECT_THROWS(save(row_state(0, 1, 5), location), ErrorCode::kAlreadyExists, "not published yet");
  EXPECT_TRUE(find_unpublished(location)[0].complete());
  for (int i = 0; i < 2; ++i) EXPECT_THROWS(publish(location), ErrorCode::kMismatch, "p");
  save(row_state(0, 1, 5), location);
  expect_whole(location, 5, 1);
}

TEST(SaveByFilesHostile, ADamagedOutcomeIsReportedAndEndsNoOtherCall) {
  const LogLevel before = set_log_level(LogLevel::kOff);
  const auto storage = memory_storage();
  const Location location(storage);
  save_rank(location, 0, 2, 3);
  const std::string outcome = engine::outcome_name(engine::save_id_of(kToken, 0));
  storage->publish(outcome, ".tilestone/x.tmp", as_bytes("publ"), false, Deadline::never());
  const auto found = find_unpublished(location);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_NE(found[0].text.find("the outcome of a save is damaged"), std::string::npos);
  EXPECT_NE(found[0].text.find("remove this file"), std::string::npos) << found[0].text;
  EXPECT_TRUE(find_leftovers(location).empty());
  EXPECT_THROWS(Checkpoint::open(location), ErrorCode::kNotFound, "outcome of a save is damaged");
  EXPECT_THROWS(save(row_state(0, 1, 5), location), ErrorCode::kAlreadyExists, "not published yet");
  storage->remove(outcome);
  save_rank(location, 1, 2, 3);
  expect_whole(location, 3, 2);
  set_log_level(before);
}

TEST(SaveByFilesHostile, ASaveWhoseRanksAllAgreeCantBeAbandoned) {
  const auto inner = memory_storage();
  const auto disk = FaultDisk::create(inner, [](const StorageCall& call) {
    // The last rank dies after it has reported.
    const bool merges = call.op == StorageOp::kCreate && call.client == 1 &&
                        call.name.find("/merged.") != std::string_view::npos;
    return merges ? FaultAction::die() : FaultAction::pass();
  });
  save_rank(Location(disk->storage(0)), 0, 2, 3);
  EXPECT_TRUE(thrown([&] { save_rank(Location(disk->storage(1)), 1, 2, 3); }));
  EXPECT_THROWS(abandon(Location(inner), {.period = 0}), ErrorCode::kUnsupported, "have written");
  publish(Location(inner));
  expect_whole(Location(inner), 3, 2);
}

TEST(SaveByFilesHostile, RanksAndTokensThatCantBeAreRefusedBeforeAnythingIsWritten) {
  const Location location(memory_storage());
  const auto refused = [&](int rank, int ranks, const std::string& token) {
    EXPECT_THROWS(save(row_state(0, 1, 3), location, by_files(rank, ranks, token)),
                  ErrorCode::kInvalidArgument, "");
  };
  refused(0, 0, kToken);
  refused(-1, 1, kToken);
  refused(2, 2, kToken);
  refused(0, INT32_MAX, kToken);
  refused(0, 1, "");
  refused(0, 1, "7 bytes");
  refused(0, 1, std::string(257, 'x'));
  EXPECT_TRUE(location.storage().list().empty());
  // Any bytes are accepted, and each text is a different token.
  std::set<std::string> ids;
  for (const std::string& token :
       {std::string(8, '\0'), std::string(9, '\0'), std::string("../../../x"),
        std::string("a\nb\nc\nd\n"), std::string("\xff\xfe\xfd\xfc\xfb\xfa\xf9\xf8"),
        std::string("a\nb\nc\nd"), std::string(256, '/')}) {
    ids.insert(engine::save_id_of(token, 0));
    ids.insert(engine::save_id_of(token, 1));
    if (token.size() < 8) continue;
    const Location own(memory_storage());
    EXPECT_TRUE(save_rank(own, 0, 1, 3, token).published);
    for (const std::string& name : own.storage().list()) EXPECT_LT(name.size(), 80u) << name;
  }
  EXPECT_EQ(ids.size(), 14u);
}

class SaveByFilesPlaces : public testing::Test {
 protected:
  void SetUp() override {
    root_ = std::filesystem::path(testing::TempDir()) /
            testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::remove_all(root_);
    std::filesystem::create_directories(root_);
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  std::string at(const std::string& name) const { return (root_ / name).string(); }

  std::filesystem::path root_;
};

TEST_F(SaveByFilesPlaces, RanksMayNameOneDirectoryInDifferentWays) {
  std::filesystem::create_directories(at("there"));
  std::filesystem::create_directory_symlink("there", at("link"));
  const std::vector<std::string> paths = {at("there"), at("there") + "//", at("link"), at("link/."),
                                          std::filesystem::relative(at("x/../there")).string()};
  const int ranks = static_cast<int>(paths.size());
  for (int rank = 0; rank < ranks; ++rank) {
    save_rank(Location(paths[static_cast<size_t>(rank)]), rank, ranks, 3);
  }
  for (const std::string& path : paths) expect_whole(Location(path), 3, ranks);
}

TEST_F(SaveByFilesPlaces, WhatIsNoDirectoryIsRefusedAndStays) {
  Location(at(".")).storage().publish("file", "file.tmp", as_bytes("mine"), false,
                                      Deadline::never());
  std::filesystem::create_symlink("nowhere", at("link"));
  std::filesystem::create_symlink("loop", at("loop"));
  for (const char* name : {"file", "file/below", "link", "loop"}) {
    EXPECT_TRUE(thrown([&] { save_rank(Location(at(name)), 0, 1, 3); })) << name;
  }
  EXPECT_EQ(as_text(read_file(Location(at(".")).storage(), "file", 100)), "mine");
  EXPECT_FALSE(std::filesystem::exists(at("nowhere")));
}

TEST_F(SaveByFilesPlaces, WhereTheLocationIsRemovedMeanwhileNothingIsPublishedThatLacksARank) {
  const Location location(at("there"));
  save_rank(location, 0, 2, 3);
  std::filesystem::remove_all(at("there"));
  EXPECT_FALSE(save_rank(location, 1, 2, 3).published);
  EXPECT_EQ(find_unpublished(location).front().missing, std::vector<int>{0});
  // Removes the data file of a rank that has reported.
  for (const auto& file : std::filesystem::directory_iterator(at("there"))) {
    if (file.path().extension() == ".distcp") std::filesystem::remove(file.path());
  }
  SaveOptions options = by_files(0, 2);
  options.timeout = 0.2;
  EXPECT_THROWS(save(row_state(0, 2, 3), location, options), ErrorCode::kMismatch, "rank 1 wrote");
  EXPECT_THROWS(Checkpoint::open(location), ErrorCode::kNotFound, "");
  // A file server may show the file later, so only a person ends the save.
  EXPECT_FALSE(find_unpublished(location).front().abandoned);
  EXPECT_NO_THROW(abandon(location, {.period = 0}));
  EXPECT_TRUE(find_unpublished(location).front().abandoned);
}

}  // namespace tilestone::save_by_files_hostile_test
