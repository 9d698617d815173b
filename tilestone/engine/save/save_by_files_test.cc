// Saves without a communicator: the ranks coordinate only by files.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <optional>
#include <thread>

#include "tilestone/base/error.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/open/attempt_files_internal.h"
#include "tilestone/engine/save/request_internal.h"
#include "tilestone/engine/save/save.h"
#include "tilestone/engine/save/save_steps_testing.h"
#include "tilestone/format/data_file_name.h"
#include "tilestone/geometry/coverage.h"
#include "tilestone/storage/directories.h"
#include "tilestone/storage/memory_storage_testing.h"

namespace tilestone::save_by_files_test {

SaveOptions by_files(int rank, int ranks, const std::string& token = kToken) {
  SaveOptions options;
  options.by_files = ByFiles{rank, ranks, token};
  options.timeout = 20;
  return options;
}

// Row `rank` of "w"; "all", which is declared to be on every rank; "p", whose holders are not
// declared; and an object.
StateDict state_of(int rank, int ranks, int64_t first, int64_t step = 7) {
  ShardedTensor row = ShardedTensor::from_rank_offsets(
      "w", counting(DType::kFloat32, {1, 8}, first + 8 * rank), {{0, rank, ranks}});
  ShardedTensor all =
      ShardedTensor::from_rank_offsets("all", counting(DType::kInt64, {16}, first), {}, {rank});
  for (int other = 0; other < ranks; ++other) all.holders.push_back(other);
  StateDict state;
  state["w"] = row;
  state["all"] = all;
  state["p"] = counting(DType::kFloat32, {3}, first);
  state["step"] = Value(step);
  return state;
}

// The text of what each rank threw.
std::vector<std::string> each_rank(int ranks, const std::function<void(int)>& body) {
  std::vector<std::string> thrown(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const Error& error) {
        thrown[static_cast<size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return thrown;
}

void expect_state(const Location& location, int ranks, int64_t first) {
  const Checkpoint checkpoint = Checkpoint::open(location);
  EXPECT_EQ(elements(checkpoint.read("w")), elements(counting(DType::kFloat32, {ranks, 8}, first)));
  EXPECT_EQ(elements(checkpoint.read("all")), elements(counting(DType::kInt64, {16}, first)));
  EXPECT_EQ(elements(checkpoint.read("p")), elements(counting(DType::kFloat32, {3}, first)));
  EXPECT_TRUE(checkpoint.verify().ok());
}

TEST(SaveByFiles, RanksPublishOneCheckpointTogetherAndWriteWhatIsDeclaredOnce) {
  for (const int ranks : {1, 2, 5, 17}) {
    const Location location(memory_storage());
    const auto thrown = each_rank(ranks, [&](int rank) {
      const SaveResult result = save(state_of(rank, ranks, 3), location, by_files(rank, ranks));
      EXPECT_TRUE(result.published);
      expect_state(location, ranks, 3);
    });
    for (const std::string& error : thrown) EXPECT_EQ(error, "");
    const Checkpoint checkpoint = Checkpoint::open(location);
    size_t of_all = 0;
    for (const StoredCopy& copy : checkpoint.metadata().copies) {
      of_all += checkpoint.metadata().tensors[copy.tensor].key == "all" ? 1 : 0;
    }
    EXPECT_EQ(of_all, 0u);
    EXPECT_EQ(checkpoint.metadata().copies.size(), static_cast<size_t>(ranks - 1));  // of "p"
    EXPECT_TRUE(find_unpublished(location).empty());
    EXPECT_TRUE(find_leftovers(location).empty());
  }
}

// Rank 2 of 3 has not written; the others keep their files.
TEST(SaveByFiles, RanksThatWaitForOneThatNeverComesNameItAndItCanStillCompleteTheCheckpoint) {
  const Location location(memory_storage());
  const auto thrown = each_rank(2, [&](int rank) {
    SaveOptions options = by_files(rank, 3);
    options.timeout = 0.5;
    save(state_of(rank, 3, 3), location, options);
  });
  for (const std::string& error : thrown) {
    EXPECT_NE(error.find("rank 2 had not written"), std::string::npos) << error;
  }
  EXPECT_THROW(Checkpoint::open(location), Error);
  const auto found = find_unpublished(location);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found.front().missing, std::vector<int>{2});
  EXPECT_EQ(found.front().world_size, 3);
  EXPECT_TRUE(find_leftovers(location).empty());
  EXPECT_THROW(publish(location), Error);
  EXPECT_TRUE(save(state_of(2, 3, 3), location, by_files(2, 3)).published);
  expect_state(location, 3, 3);
  // Repeating the save under the same token does nothing.
  EXPECT_EQ(save(state_of(1, 3, 3), location, by_files(1, 3)).bytes_written, 0u);
}

TEST(SaveByFiles, AFailureOfARankIsReportedBeforeTheDeadlineAndTheRanksCanTryAgain) {
  const Location location(memory_storage());
  const auto failing = [](int rank) {
    SaveOptions options = by_files(rank, 2);
    options.progress = [rank](const Progress&) {
      if (rank == 1) throw std::runtime_error("the disk is on fire");
    };
    return options;
  };
  const auto thrown = each_rank(2, [&](int rank) {
    try {
      save(state_of(rank, 2, 3), location, failing(rank));
    } catch (const std::runtime_error& error) {
      throw Error(ErrorCode::kIo, error.what());
    }
  });
  EXPECT_NE(thrown[0].find("the disk is on fire"), std::string::npos) << thrown[0];
  EXPECT_NE(thrown[0].find("rank 1"), std::string::npos) << thrown[0];
  for (const int rank : {0, 1}) {
    SaveOptions again = by_files(rank, 2);
    again.by_files->number = 1;
    again.by_files->wait = false;
    EXPECT_EQ(save(state_of(rank, 2, 3), location, again).published, rank == 1);
  }
  expect_state(location, 2, 3);
}

TEST(SaveByFiles, WithoutWaitingTheLastRankOrAnyoneLaterPublishesTheSameBytes) {
  std::vector<Bytes> indices;
  for (const bool later : {false, true}) {
    const auto storage = memory_storage();
    const Location location(storage);
    for (const int rank : {2, 0, 1}) {
      SaveOptions options = by_files(rank, 3);
      options.by_files->wait = false;
      if (later && rank == 1) {
        // Here the last rank also waits for the publication.
        options.by_files->wait = true;
      }
      EXPECT_EQ(save(state_of(rank, 3, 5), location, options).published, rank == 1);
    }
    indices.push_back(read_file(*storage, ".metadata", UINT64_MAX));
    expect_state(location, 3, 5);
  }
  EXPECT_EQ(indices[0], indices[1]);
}

TEST(SaveByFiles, ReplicasThatDifferUnderOneKeyAreRefusedByThatKeyWhenTheSaveIsPublished) {
  const Location location(memory_storage());
  const auto thrown = each_rank(2, [&](int rank) {
    StateDict state = state_of(rank, 2, 3);
    state["p"] = counting(DType::kFloat32, {3}, rank);
    SaveOptions options = by_files(rank, 2);
    options.timeout = 5;
    save(state, location, options);
  });
  for (const std::string& error : thrown) {
    EXPECT_NE(error.find("key p"), std::string::npos) << error;
  }
  EXPECT_THROW(Checkpoint::open(location), Error);
}

TEST(SaveByFiles, ObjectsThatOnlySomeRanksHaveAreRefused) {
  const Location location(memory_storage());
  const auto thrown = each_rank(2, [&](int rank) {
    StateDict state = state_of(rank, 2, 3);
    if (rank == 1) state["only here"] = Value(1);
    SaveOptions options = by_files(rank, 2);
    options.timeout = 5;
    save(state, location, options);
  });
  for (const std::string& error : thrown) {
    EXPECT_NE(error.find("rank 1: the keys of the objects"), std::string::npos) << error;
  }
}

TEST(SaveByFiles, RanksThatContradictEachOtherGetAnErrorAtOnce) {
  const Location location(memory_storage());
  SaveOptions first = by_files(0, 2);
  first.by_files->wait = false;
  save(state_of(0, 2, 3), location, first);
  try {
    save(state_of(1, 3, 3), location, by_files(1, 3));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kMismatch);
    EXPECT_NE(std::string(error.what()).find("world_size: 3 here, 2 on"), std::string::npos)
        << error.what();
  }
}

TEST(SaveByFiles, AnAbandonedSaveIsOverForGoodAndGcRemovesItsFiles) {
  const auto storage = memory_storage();
  const Location location(storage);
  SaveOptions options = by_files(0, 2);
  options.by_files->wait = false;
  save(state_of(0, 2, 3), location, options);
  // A save with a communicator is refused there.
  EXPECT_THROW(save(state_of(0, 1, 3), location), Error);
  AbandonOptions at_once;
  at_once.period = 0;
  abandon(location, at_once);
  EXPECT_FALSE(remove_leftovers(location).empty());
  const std::string outcome = engine::outcome_name(engine::save_id_of(kToken, 0));
  for (const std::string& name : storage->list()) {
    EXPECT_TRUE(name == outcome || name == ".tilestone/lock") << name;
  }
  try {
    save(state_of(1, 2, 3), location, by_files(1, 2));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kRankFailed) << error.what();
  }
  // The location is free for saves under another token, and with a communicator.
  EXPECT_TRUE(save(state_of(0, 1, 9), location, by_files(0, 1, "another run of it")).published);
  expect_state(location, 1, 9);
  SaveOptions over;
  over.overwrite = true;
  save(state_of(0, 1, 4), location, over);
  expect_state(location, 1, 4);
}

TEST(SaveByFiles, GcLeavesNoEmptyDirectoriesOfAnAbandonedSave) {
  const auto storage = memory_storage();
  const Location location(storage);
  SaveOptions options = by_files(0, 2);
  options.by_files->wait = false;
  save(state_of(0, 2, 3), location, options);
  ASSERT_FALSE(storage->list_directories(".tilestone/").empty());
  AbandonOptions at_once;
  at_once.period = 0;
  abandon(location, at_once);
  remove_leftovers(location);
  EXPECT_TRUE(storage->list_directories(".tilestone/").empty());
  // Those of a save that may just begin stay.
  const std::string other = engine::attempt_directory(engine::save_id_of("another run", 0));
  storage->directories()->make(other);
  options.by_files->token = "a third run";
  save(state_of(0, 2, 3), location, options);
  abandon(location, at_once);
  remove_leftovers(location);
  EXPECT_EQ(storage->list_directories(".tilestone/"), std::vector<std::string>{other});
}

TEST(SaveByFiles, TheFirstReceiptOfARankCountsAndATwinsFilesGo) {
  const auto storage = memory_storage();
  const Location location(storage);
  SaveOptions options = by_files(0, 2);
  options.by_files->wait = false;
  const SaveResult first = save(state_of(0, 2, 3), location, options);
  const auto files = storage->list();
  EXPECT_EQ(save(state_of(0, 2, 3), location, options).bytes_written, 0u);
  EXPECT_THAT([&] { save(state_of(0, 2, 99), location, options); },
              testing::ThrowsMessage<Error>(testing::HasSubstr("other elements (key w)")));
  EXPECT_EQ(storage->list(), files);
  save(state_of(1, 2, 3), location, by_files(1, 2));
  expect_state(location, 2, 3);
}

TEST(SaveByFiles, OfTwoProcessesOfARankTheOneWithOtherElementsFails) {
  const auto storage = memory_storage();
  const Location location(storage);
  SaveOptions options = by_files(0, 2);
  options.by_files->wait = false;
  const StateDict first = state_of(0, 2, 3), other = state_of(0, 2, 99);
  const auto written = [&](const StateDict& state) {
    return begin_save(state, location, options).write();
  };
  SteppedSave twins[] = {written(first), written(first), written(other)};
  twins[0].report().publish();
  twins[1].report().publish();
  EXPECT_THAT([&] { twins[2].report(); },
              testing::ThrowsMessage<Error>(testing::HasSubstr("other elements (key w)")));
  save(state_of(1, 2, 3), location, by_files(1, 2));
  expect_state(location, 2, 3);
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

std::string opening_error(const Location& location) {
  return error_of([&] { Checkpoint::open(location); });
}

SaveOptions without_waiting(int rank, int ranks, const std::string& token = kToken) {
  SaveOptions options = by_files(rank, ranks, token);
  options.by_files->wait = false;
  return options;
}

void expect_in(const std::string& part, const std::string& text) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

// As after a rank died while it made or removed its files.
TEST(SaveByFiles, ARankThatIsStartedAgainWritesBehindAnyDataFileThatItHasLeft) {
  for (const int left : {0, 1, 2}) {
    const auto storage = memory_storage();
    const std::string id = engine::save_id_of(kToken, 0);
    storage->create(data_file_name(id, 0, left))->close();
    for (int rank = 0; rank < 2; ++rank) {
      SaveOptions options = by_files(rank, 2);
      options.by_files->wait = false;
      options.resources.files_per_rank = 2;
      EXPECT_NO_THROW(save(state_of(rank, 2, 3), Location(storage), options)) << left;
    }
    expect_state(Location(storage), 2, 3);
  }
}

TEST(SaveByFiles, OpeningAnUnpublishedSaveSaysWhatIsMissingAndWhatCanBeDone) {
  const auto storage = memory_storage();
  const Location location(storage);
  for (const int rank : {0, 3}) save(state_of(rank, 12, 3), location, without_waiting(rank, 12));
  expect_in("10 of its 12 ranks have not written (ranks 1, 2, 4, 5, 6, 7, 8, 9 and 2 more)",
            opening_error(location));
  expect_in("no checkpoint at", opening_error(location));
  expect_in("`tilestone gc --abandon` ends the save", opening_error(location));
  // If there are several, one is described.
  save(state_of(0, 2, 3), location, without_waiting(0, 2, "another run of it"));
  expect_in("`tilestone publish --list` shows 1 more", opening_error(location));
  EXPECT_EQ(find_unpublished(location).size(), 2u);
  EXPECT_TRUE(find_leftovers(location).empty());
  // Its manifest is made before the switch, and does not make it a lost checkpoint.
  save(state_of(1, 2, 3), location, without_waiting(1, 2, "another run of it"));
  expect_state(location, 2, 3);
  EXPECT_EQ(find_unpublished(location).size(), 1u);
}

// A publisher dies between manifest and switch: this is not a checkpoint that has lost its index.
TEST(SaveByFiles, ASaveThatLacksOnlyItsSwitchIsUnpublishedAndNotLost) {
  const auto storage = memory_storage();
  const Location location(storage);
  save(state_of(0, 2, 3), location, without_waiting(0, 2));
  const FileImage before = memory_image(*storage);
  save(state_of(1, 2, 3), location, without_waiting(1, 2));
  FileImage crashed = memory_image(*storage);
  crashed.erase(".metadata");
  for (const auto& [name, bytes] : before) crashed.insert({name, bytes});
  const std::string save_id = engine::save_id_of(kToken, 0);
  crashed.erase(engine::outcome_name(save_id));
  const auto after = memory_storage(crashed);
  expect_in("not published", opening_error(Location(after)));
  EXPECT_TRUE(find_leftovers(Location(after)).empty());
}

TEST(SaveByFiles, AnAttemptBesideACheckpointIsInNobodysWay) {
  const Location location(memory_storage());
  save(state_of(0, 3, 9), location, without_waiting(0, 3));
  save(state_of(0, 1, 4), location, without_waiting(0, 1, "another run of it"));
  expect_state(location, 1, 4);
  EXPECT_EQ(find_unpublished(location).size(), 1u);
  EXPECT_TRUE(find_leftovers(location).empty());
}

TEST(SaveByFiles, AnUnpublishedSaveThatIsWatchedShowsThatItIsAlive) {
  constexpr int kRanks = 10000;
  const Location location(memory_storage());
  StateDict state;
  state["step"] = Value(int64_t{7});
  save(state, location, without_waiting(0, kRanks));
  EXPECT_EQ(find_unpublished(location).front().alive, std::nullopt);
  const FindOptions watching{0.05, nullptr};
  EXPECT_EQ(find_unpublished(location, watching).front().alive,
            std::nullopt);  // watched for too short a time
  std::atomic<bool> seen = false;
  std::thread ranks([&] {
    for (int rank = 1; rank + 1 < kRanks && !seen; ++rank) {
      save(state, location, without_waiting(rank, kRanks));
    }
  });
  while (find_unpublished(location, watching).front().alive != true) continue;
  seen = true;
  ranks.join();
  EXPECT_THROW(find_unpublished(location, {-1, nullptr}), Error);
}

TEST(SaveByFiles, TheErrorOfARankThatCanNotSaveItsStateReachesTheWaitingRanks) {
  const auto refused_by = [](const std::function<void(const Location&)>& second) {
    const Location location(memory_storage());
    const auto thrown = each_rank(2, [&](int rank) {
      if (rank == 1) return second(location);
      save(state_of(0, 2, 3), location, by_files(0, 2));
    });
    EXPECT_TRUE(thrown[0].starts_with(thrown[1])) << thrown[0];  // if it comes late, with a hint
    return thrown[0];
  };
  // A rank's state can't be made; contradicts the others'; or names holders outside the world.
  expect_in("the state is on fire", refused_by([](const Location& location) {
              const SaveOptions options = by_files(1, 2);
              const Error failed(ErrorCode::kInvalidArgument, "the state is on fire");
              save_in_a_row({location, options, Deadline::never()},
                            engine::MadeRequest(Error(failed).with_rank(1)));
            }));
  expect_in("declared to hold", refused_by([](const Location& location) {
              save(state_of(1, 5, 3), location, by_files(1, 2));
            }));
}

TEST(SaveByFiles, OptionsThatTheRanksOfASaveMustHaveInCommonAreNamedWithBothValues) {
  const auto refusal = [](const std::function<void(SaveOptions&)>& change) {
    const Location location(memory_storage());
    save(state_of(0, 2, 3), location, without_waiting(0, 2));
    SaveOptions other = without_waiting(1, 2);
    change(other);
    try {
      save(state_of(1, 2, 3), location, other);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kMismatch);
      return std::string(error.what());
    }
    return std::string("not refused");
  };
  EXPECT_THAT(refusal([](SaveOptions& o) { o.checks.common_differs = Checks::Differing::kError; }),
              testing::HasSubstr("common_differs: \"error\" here, \"warn\" on"));
  EXPECT_THAT(refusal([](SaveOptions& o) { o.attributes["step"] = "7"; }),
              testing::HasSubstr("attributes: {\"step\": \"7\"} here, {} on"));
}

TEST(SaveByFiles, NothingIsReplacedAndSomeOptionsAreRefused) {
  const Location location(memory_storage());
  save(state_of(0, 1, 3), location);
  EXPECT_THROW(save(state_of(0, 1, 3), location, by_files(0, 1)), Error);
  expect_state(location, 1, 3);
  const Location empty(memory_storage());
  const auto refused = [&](const std::function<void(SaveOptions&)>& change, ErrorCode code) {
    SaveOptions options = by_files(0, 1);
    change(options);
    try {
      save(state_of(0, 1, 3), empty, options);
      ADD_FAILURE() << "not refused";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
    }
  };
  refused([](SaveOptions& o) { o.by_files->token = "short"; }, ErrorCode::kInvalidArgument);
  refused([](SaveOptions& o) { o.by_files->rank = 1; }, ErrorCode::kInvalidArgument);
  refused([](SaveOptions& o) { o.overwrite = true; }, ErrorCode::kInvalidArgument);
  refused([](SaveOptions& o) { o.checks.access = true; }, ErrorCode::kUnsupported);
  refused([](SaveOptions& o) { o.dialect = megatron_shards_dialect(); }, ErrorCode::kUnsupported);
  EXPECT_TRUE(empty.storage().list().empty());
}

}  // namespace tilestone::save_by_files_test
