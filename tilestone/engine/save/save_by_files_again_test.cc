// Saves without a communicator whose ranks fail and try again, or that conflict with another save.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tilestone/base/checksum.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/open/attempt_files_internal.h"
#include "tilestone/engine/save/save_steps_testing.h"
#include "tilestone/storage/directories.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"

namespace tilestone::save_by_files_again_test {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

Error error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return {ErrorCode::kInternal, ""};
}

void expect_in(const std::string& part, const Error& error) {
  EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
}

// Waits until the file exists; fails the test after a while.
void wait_for(Storage& storage, const std::string& name) {
  const auto begin = Clock::now();
  while (!storage.stat(name) && since(begin) < 20) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

engine::AttemptHead head_for(int ranks, uint64_t number = 0) {
  engine::AttemptHead head;
  head.save_id = engine::save_id_of(kToken, number);
  head.world_size = ranks;
  return head;
}

void write_file(Storage& storage, const std::string& name, const std::string& text) {
  if (storage.stat(name)) storage.remove(name);
  const auto file = storage.create(name);
  file->append(as_bytes(text));
  file->close();
}

// ---- Ranks that die or leave between their receipt and the end

// Ranks 2 and 3 of 4 are a group: no other rank would merge its receipts.
TEST(SaveByFilesAgain, WhoWaitsPublishesAlsoWhereAllRanksOfAnotherGroupHaveDiedAfterTheirReceipts) {
  const auto storage = memory_storage();
  const Location location(storage);
  for (const int rank : {3, 2}) {
    begin_save(row_state(rank, 4), location, by_files(rank, 4, kToken, true))
        .write()
        .report();  // the result is dropped: the rank never calls publish()
  }
  EXPECT_FALSE(save(row_state(1, 4), location, by_files(1, 4)).published);
  EXPECT_FALSE(storage->stat(engine::attempt_directory(head_for(4).save_id) + "/1/merged"));
  const auto begin = Clock::now();
  EXPECT_TRUE(save(row_state(0, 4), location, by_files(0, 4, kToken, true)).published);
  EXPECT_LT(since(begin), 20);
  EXPECT_TRUE(Checkpoint::open(location).verify().ok());
  EXPECT_TRUE(find_unpublished(location).empty());
}

// The publisher dies between the switch and its note, and gc removes what it has left.
TEST(SaveByFilesAgain, WhoComesAfterGcHasRemovedWhatADeadPublisherLeftFindsItsSavePublished) {
  const auto inner = memory_storage();
  const auto disk = FaultDisk::create(inner, [](const StorageCall& call) {
    const bool is_switch = call.op == StorageOp::kRename && call.to == ".metadata";
    return is_switch ? FaultAction::die_after() : FaultAction::pass();
  });
  save(row_state(0, 2), Location(inner), by_files(0, 2));
  error_of([&] { save(row_state(1, 2), Location(disk->storage()), by_files(1, 2)); });
  EXPECT_FALSE(remove_leftovers(Location(inner)).empty());
  EXPECT_FALSE(inner->stat(engine::attempt_name(head_for(2).save_id)));
  EXPECT_TRUE(save(row_state(1, 2), Location(inner), by_files(1, 2, kToken, true)).published);
  EXPECT_TRUE(find_unpublished(Location(inner)).empty());
  expect_rows(Location(inner), 3, 2);
}

TEST(SaveByFilesAgain, WhoWaitsLearnsBeforeItsDeadlineThatAnotherRunWasPublished) {
  const Location location(memory_storage());
  // The other rank of this run never comes.
  SteppedSave waiting =
      begin_save(row_state(0, 2), location, by_files(0, 2, "another run", true)).write().report();
  for (const int rank : {0, 1}) save(row_state(rank, 2), location, by_files(rank, 2));
  const auto begin = Clock::now();
  const Error error = error_of([&] { waiting.publish(); });
  EXPECT_EQ(error.code(), ErrorCode::kAlreadyExists) << error.what();
  expect_in("another checkpoint was published", error);
  EXPECT_LT(since(begin), 20);
  EXPECT_TRUE(Checkpoint::open(location).verify().ok());
}

TEST(SaveByFilesAgain, ASaveWhoseRanksContradictEachOtherHasFailedAndSaysSoWhereItIsLookedFor) {
  const Location location(memory_storage());
  save(row_state(0, 2), location, by_files(0, 2));
  StateDict other = row_state(1, 2);
  other["p"] = counting(DType::kFloat32, {3}, 3);
  const Error error = error_of([&] { save(other, location, by_files(1, 2)); });
  const auto found = find_unpublished(location);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_TRUE(found.front().abandoned && !found.front().complete());
  expect_in(error.message(), Error(ErrorCode::kInternal, found.front().failure));
  const Error text(ErrorCode::kInternal, found.front().text);
  expect_in("has failed: " + error.message(), text);
  expect_in("`tilestone gc --delete` removes its files", text);
  expect_in(error.message(), error_of([&] { Checkpoint::open(location); }));
  EXPECT_NO_THROW(save(row_state(0, 1, 5), location));
}

TEST(SaveByFilesAgain, WhoPublishesACompleteSaveBesideAnotherCheckpointEndsIt) {
  const auto storage = memory_storage();
  const Location location(storage);
  for (const char* token : {kToken, "another run"}) {
    save(row_state(0, 2), location, by_files(0, 2, token));
  }
  begin_save(row_state(1, 2), location, by_files(1, 2)).write().report();
  save(row_state(1, 2), location, by_files(1, 2, "another run"));
  EXPECT_EQ(error_of([&] { publish(location); }).code(), ErrorCode::kAlreadyExists);
  ASSERT_EQ(find_unpublished(location).size(), 1u);
  EXPECT_TRUE(find_unpublished(location).front().abandoned);
  remove_leftovers(location);
  EXPECT_TRUE(find_unpublished(location).empty());
  EXPECT_TRUE(Checkpoint::open(location).verify().ok());
}

// ---- A failure

TEST(SaveByFilesAgain, AFailureEndsTheSaveForAllItsRanksAndTheNextNumberGoesOn) {
  const Location location(memory_storage());
  save(row_state(0, 3), location, by_files(0, 3));
  const Error error = error_of([&] { save(hollow_state(), location, by_files(1, 3)); });
  // Whether a rank has written, comes only now, or has failed itself and is started again.
  for (const int rank : {0, 2, 1}) {
    const Error heard =
        error_of([&] { save(row_state(rank, 3), location, by_files(rank, 3, kToken, true)); });
    EXPECT_EQ(heard.code(), error.code()) << heard.what();
    EXPECT_EQ(heard.message(), error.message());
    EXPECT_EQ(heard.key(), "hollow");
    EXPECT_EQ(heard.rank(), 1);
    expect_in("another number or token", heard);
  }
  for (int rank = 0; rank < 3; ++rank) {
    SaveOptions options = by_files(rank, 3);
    options.by_files->number = 1;
    save(row_state(rank, 3), location, options);
  }
  expect_rows(location, 3, 3);
  remove_leftovers(location);
  expect_rows(location, 3, 3);
}

TEST(SaveByFilesAgain, ARankOfAnotherWorldEndsTheSaveUnlessAllItsRanksHaveWritten) {
  for (const bool complete : {false, true}) {
    const auto storage = memory_storage();
    const Location location(storage);
    save(row_state(0, 2), location, rank_local(0, 2));
    if (complete) save(row_state(1, 2), location, rank_local(1, 2));
    expect_in("world_size", error_of([&] { save(row_state(2, 3), location, rank_local(2, 3)); }));
    EXPECT_EQ(engine::read_failed(*storage, head_for(2).save_id).has_value(), !complete);
    EXPECT_EQ(storage->stat("__0.metadata").has_value(), complete);
    if (complete) expect_rows(location, 3, 2);
  }
}

// As a build leaves it that keeps failures in a file of their own.
TEST(SaveByFilesAgain, AnUnfinishedSaveOfAnOlderBuildIsNamedAndCanBeEndedAndRemoved) {
  const auto storage = memory_storage();
  const Location location(storage);
  save(row_state(0, 2), location, by_files(0, 2));
  const std::string id = head_for(2).save_id, directory = engine::attempt_directory(id);
  write_file(*storage, directory + "/failed", "a failure of an older build");
  expect_in("the save " + id + " is not published", error_of([&] { Checkpoint::open(location); }));
  EXPECT_EQ(error_of([&] { save(row_state(0, 1, 5), location); }).code(),
            ErrorCode::kAlreadyExists);
  EXPECT_EQ(abandon(location, {.period = 0}), id);
  remove_leftovers(location);
  for (const std::string& name : storage->list()) {
    EXPECT_TRUE(name == engine::outcome_name(id) || name == ".tilestone/lock") << name;
  }
}

// ---- The same token and number once more

bool is_warned_of(const LoggedWarnings& logged) {
  const std::vector<std::string> texts = logged.texts();
  return std::any_of(texts.begin(), texts.end(), [](const std::string& text) {
    return text.find("another number to save another state") != std::string::npos;
  });
}

TEST(SaveByFilesAgain,
     ARankWithAnotherStateThanThatOfAPublishedSaveGetsAnErrorThatNothingIsWritten) {
  const Location location(memory_storage());
  {
    const LoggedWarnings logged;
    for (const int rank : {0, 1}) save(row_state(rank, 2), location, by_files(rank, 2));
    EXPECT_FALSE(is_warned_of(logged));
  }
  const LoggedWarnings logged;
  const Error error = error_of([&] { save(row_state(0, 2, 9), location, by_files(0, 2)); });
  EXPECT_EQ(error.code(), ErrorCode::kMismatch) << error.what();
  expect_in("another number", error);
  EXPECT_FALSE(is_warned_of(logged));
  EXPECT_EQ(save(row_state(0, 2), location, by_files(0, 2)).bytes_written, 0u);
  EXPECT_TRUE(is_warned_of(logged));
  expect_rows(location, 3, 2);
}

StateDict without(StateDict state, const std::string& key) {
  std::erase_if(state.entries(),
                [&](const auto& entry) { return entry.first == PathElement(key); });
  return state;
}

TEST(SaveByFilesAgain, WhoHasReportedGoesOnWithItsStateAndIsRefusedWithAStateOfAnotherKind) {
  const auto spoiled = [](const std::function<void(StateDict&)>& spoil) {
    StateDict state = row_state(0, 2);
    spoil(state);
    return state;
  };
  const std::vector<std::pair<std::string, StateDict>> others = {
      {"p", spoiled([](StateDict& state) { state["p"] = counting(DType::kInt64, {4}, 3); })},
      {"p", spoiled([](StateDict& state) { state["p"] = counting(DType::kInt32, {3}, 3); })},
      {"p", spoiled([](StateDict& state) { state = without(state, "p"); })},
      {"q", spoiled([](StateDict& state) { state["q"] = counting(DType::kInt64, {3}, 3); })},
      {"step", spoiled([](StateDict& state) { state = without(state, "step"); })},
      {"w", spoiled([](StateDict& state) { state["w"] = row_state(1, 2)["w"]; })},
  };
  // The rank's receipt is a file of its own (2 ranks), or merged with its group's (3 ranks).
  for (const int ranks : {2, 3}) {
    const auto storage = memory_storage();
    const Location location(storage);
    save(row_state(0, 2), location, by_files(0, ranks));
    if (ranks == 3) save(row_state(1, 2), location, by_files(1, ranks));
    const size_t files = storage->list_files().size();
    for (const auto& [key, state] : others) {
      const Error error = error_of([&] { save(state, location, by_files(0, ranks)); });
      EXPECT_EQ(error.code(), ErrorCode::kMismatch) << error.what();
      EXPECT_EQ(error.key(), key) << error.what();
      EXPECT_EQ(error.rank(), 0);
      expect_in("another number", error);
      // The other ranks need nothing more from this rank.
      EXPECT_FALSE(engine::read_failed(*storage, engine::save_id_of(kToken, 0)));
    }
    const LoggedWarnings logged;
    EXPECT_FALSE(save(row_state(0, 2), location, by_files(0, ranks)).published);
    EXPECT_TRUE(is_warned_of(logged));
    EXPECT_EQ(storage->list_files().size(), files);
  }
}

// ---- Another checkpoint comes first

TEST(SaveByFilesAgain, AWaitingRankGetsAnErrorAtOnceIfAnotherCheckpointCameFirst) {
  const auto storage = memory_storage();
  const Location location(storage);
  Clock::time_point told;
  std::thread late([&] {
    wait_for(*storage, engine::attempt_receipt_name(head_for(2), 0));
    std::this_thread::sleep_for(std::chrono::milliseconds(200));  // rank 0 waits
    save(row_state(0, 1, 9), location, by_files(0, 1, "another run of it"));
    expect_in("another checkpoint was published",
              error_of([&] { save(row_state(1, 2), location, by_files(1, 2)); }));
    told = Clock::now();
  });
  const Error heard =
      error_of([&] { save(row_state(0, 2), location, by_files(0, 2, kToken, true)); });
  const auto end = Clock::now();
  late.join();
  EXPECT_EQ(heard.code(), ErrorCode::kAlreadyExists) << heard.what();
  expect_in("rank 1", heard);
  // Without the failure that was left, it would try to publish by itself, after 3 s or more.
  EXPECT_LT(std::chrono::duration<double>(end - told).count(), 2.5);
  expect_rows(location, 9, 1);
}

// ---- A damaged head

TEST(SaveByFilesAgain, ADamagedHeadSaysWhatCanBeDoneAndDoingItOpensTheRanksMetadata) {
  const auto storage = memory_storage();
  const Location location(storage);
  for (int rank = 0; rank < 2; ++rank) save(row_state(rank, 2), location, rank_local(rank, 2));
  const std::string save_id = engine::save_id_of(kToken, 0);
  write_file(*storage, engine::attempt_name(save_id), "no head at all");
  const Error error = error_of([&] { Checkpoint::open(location); });
  EXPECT_EQ(error.code(), ErrorCode::kCorrupt);
  EXPECT_EQ(error.file(), engine::attempt_name(save_id));
  expect_in("`tilestone gc --abandon` ends the save", error);
  expect_in("the directory .tilestone/" + save_id, error);
  ASSERT_EQ(find_unpublished(location).size(), 1u);
  EXPECT_NE(find_unpublished(location)[0].text.find("can't be"), std::string::npos);
  storage->remove(engine::attempt_name(save_id));
  storage->remove_tree(engine::attempt_directory(save_id));
  expect_rows(location, 3, 2);
  publish(location);
  expect_rows(location, 3, 2);
}

TEST(SaveByFilesAgain, ASaveWhoseHeadIsDamagedCanBeAbandoned) {
  const auto storage = memory_storage();
  const Location location(storage);
  save(row_state(0, 2), location, by_files(0, 2));
  write_file(*storage, engine::attempt_name(engine::save_id_of(kToken, 0)), "no head at all");
  EXPECT_NO_THROW(abandon(location, {.period = 0}));
  EXPECT_NO_THROW(save(row_state(0, 1, 5), location));
  expect_rows(location, 5, 1);
}

// ---- What other ranks do at the same time

// Ranks 0 and 1 are one group. Their receipts are merged while rank 0 looks for missing receipts.
TEST(SaveByFilesAgain, ARankThatReportsDuringTheLastLookIsNotSaidToBeMissing) {
  const auto inner = memory_storage();
  const auto begin = Clock::now();
  bool done = false;
  const auto disk = FaultDisk::create(inner, [&](const StorageCall& call) {
    const bool is_last_look = call.op == StorageOp::kStat && call.client == 0 &&
                              call.name.ends_with("/0/0.report") && since(begin) > 0.5;
    if (is_last_look && !std::exchange(done, true)) {
      save(row_state(1, 3), Location(inner), by_files(1, 3));
    }
    return FaultAction::pass();
  });
  SaveOptions options = by_files(0, 3, kToken, true);
  options.timeout = 0.5;
  const Error error = error_of([&] { save(row_state(0, 3), Location(disk->storage()), options); });
  EXPECT_TRUE(done);
  EXPECT_EQ(error.code(), ErrorCode::kTimeout);
  expect_in("rank 2 had not written", error);
  expect_in("this rank can save again", error);
}

// ---- The next try

TEST(SaveByFilesAgain, TheNextNumberGoesOnWhereARanksStateWasRefused) {
  const auto storage = memory_storage();
  const Location location(storage);
  save(row_state(1, 2), location, rank_local(1, 2, 0));
  error_of([&] { save(hollow_state(), location, rank_local(0, 2, 0)); });
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_NO_THROW(save(row_state(rank, 2), location, rank_local(rank, 2, 1)));
  }
  expect_rows(location, 3, 2);
}

TEST(SaveByFilesAgain, ASaveThatMayBeRunningBlocksAnotherAndTheErrorSaysWhatEndsIt) {
  for (const SaveOptions& before : {rank_local(0, 2, 0), by_files(0, 2, "another run of it")}) {
    const Location location(memory_storage());
    save(row_state(0, 2), location, before);
    const Error error = error_of([&] { save(row_state(0, 2), location, rank_local(0, 2, 1)); });
    EXPECT_EQ(error.code(), ErrorCode::kAlreadyExists) << error.what();
    const Error together = error_of([&] { save(row_state(0, 1), location); });
    EXPECT_EQ(together.code(), ErrorCode::kAlreadyExists) << together.what();
    expect_in("`tilestone gc --abandon` ends it if they are dead", together);
  }
}

// ---- Attributes

TEST(SaveByFilesAgain, ARankLocalCheckpointShowsItsAttributesBeforeItIsPublished) {
  const Location location(memory_storage());
  for (int rank = 0; rank < 2; ++rank) {
    SaveOptions options = rank_local(rank, 2);
    options.attributes = {{"iteration", "100"}};
    save(row_state(rank, 2), location, options);
  }
  for (const bool published : {false, true}) {
    if (published) publish(location);
    const std::optional<SaveRecord> record = Checkpoint::open(location).save_record();
    ASSERT_TRUE(record);
    EXPECT_EQ(record->world_size, 2);
    EXPECT_EQ(record->attributes, (std::map<std::string, std::string>{{"iteration", "100"}}));
  }
}

}  // namespace tilestone::save_by_files_again_test
