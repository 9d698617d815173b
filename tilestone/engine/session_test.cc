// Sessions: what a save keeps for the next one.
#include "tilestone/engine/session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <limits>

#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/save/save_steps_testing.h"
#include "tilestone/engine/save/session_parts_internal.h"
#include "tilestone/format/zarr/zarr.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::session_test {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;

constexpr double kSeconds = 20;

SaveOptions within_seconds() {
  SaveOptions options;
  options.timeout = kSeconds;
  options.resources.threads = 1;
  return options;
}

TEST(Session, AllRanksHaveOneTokenAndEverySessionHasItsOwn) {
  std::vector<std::string> first(3), second(3);
  run_ranks(3, [&](const Communicator& comm) {
    const auto rank = static_cast<size_t>(comm.rank());
    first[rank] = Session(comm, kSeconds).token();
    second[rank] = Session(comm, kSeconds).token();
  });
  EXPECT_THAT(first, Each(first[0]));
  EXPECT_THAT(second, Each(second[0]));
  EXPECT_NE(first[0], second[0]);
  expect_error([] { Session(2, 2, "a run of a test"); }, ErrorCode::kInvalidArgument, "rank is 2");
  expect_error([] { Session(0, 2, "short"); }, ErrorCode::kInvalidArgument, "token has 5 bytes");
}

TEST(Session, WhatHasTheStructureOfAnEarlierSaveIsSavedWithoutSendingPlans) {
  const std::vector<Location> at = memory_locations(4);
  run_ranks(2, [&](const Communicator& comm) {
    Session session(comm, kSeconds);
    for (int64_t i = 0; i < 3; ++i) {
      const SaveResult result =
          session.save(row_state(comm, 10 * i), at[static_cast<size_t>(i)], within_seconds());
      EXPECT_EQ(result.items_written, comm.rank() == 0 ? 3u : 1u) << i;
    }
    const SessionStats stats = session.stats();
    EXPECT_EQ(stats.saves, 3u);
    EXPECT_EQ(stats.plans_exchanged, 1u);
    EXPECT_EQ(stats.plans_from_cache, 2u);
    const uint64_t once = stats.plan_bytes_sent;
    EXPECT_GT(once, 0u);
    // Only one rank has a different object: all ranks send their plans.
    StateDict state = row_state(comm, 30);
    if (comm.rank() == 1) state["more"] = Value(1);
    session.save(state, at[3], within_seconds());
    EXPECT_EQ(session.stats().plans_exchanged, 2u);
    EXPECT_GT(session.stats().plan_bytes_sent, once);
  });
  for (int64_t i = 0; i < 4; ++i) expect_rows(at[static_cast<size_t>(i)], 10 * i, 2);
  EXPECT_EQ(Checkpoint::open(at[3]).read_object("more"), Value(1));
}

TEST(Session, RanksWithoutASessionBesideOneExchangeTheirPlans) {
  const std::vector<Location> at = memory_locations(2);
  run_ranks(2, [&](const Communicator& comm) {
    Session session(comm, kSeconds);
    SaveOptions options = within_seconds();
    options.comm = comm;
    for (const Location& location : at) {
      if (comm.rank() == 0) session.save(row_state(comm, 3), location, options);
      if (comm.rank() == 1) save(row_state(comm, 3), location, options);
    }
    EXPECT_EQ(session.stats().plans_from_cache, 0u);
  });
  for (const Location& location : at) expect_rows(location, 3, 2);
}

TEST(Session, ObjectsThatDifferBetweenRanksAreFoundThoughThePlanIsAnEarlierOne) {
  const std::vector<Location> at = memory_locations(2);
  const auto texts = failures(2, [&](const Communicator& comm) {
    Session session(comm, kSeconds);
    SaveOptions options = within_seconds();
    options.checks.common_differs = Checks::Differing::kError;
    session.save(row_state(comm, 3), at[0], options);
    StateDict state = row_state(comm, 3);
    state["step"] = Value(comm.rank());
    session.save(state, at[1], options);
  });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("not the same on all ranks"), HasSubstr("step"))));
}

TEST(Session, ObjectsThatAlwaysDifferLeaveThePlansAsTheyAre) {
  const std::vector<Location> at = memory_locations(4);
  run_ranks(2, [&](const Communicator& comm) {
    Session session(comm, kSeconds);
    for (const Location& location : at) {
      StateDict state = row_state(comm, 3);
      state["mine"] = Value(comm.rank());
      session.save(state, location, within_seconds());
    }
    EXPECT_EQ(session.stats().plans_exchanged, 1u);
    EXPECT_EQ(session.stats().plans_from_cache, 3u);
  });
  for (const Location& location : at) expect_rows(location, 3, 2);
}

// Megatron-Core's dialect compares its common state as a whole, with an earlier plan too.
TEST(Session, ACommonStateThatDiffersIsFoundToo) {
  const std::vector<Location> at = memory_locations(3);
  const auto texts = failures(2, [&](const Communicator& comm) {
    Session session(comm, kSeconds);
    SaveOptions options = within_seconds();
    options.dialect = megatron_dialect();
    options.checks.common_differs = Checks::Differing::kError;
    session.save(row_state(comm, 3), at[0], options);
    session.save(row_state(comm, 5), at[1], options);
    EXPECT_EQ(session.stats().plans_from_cache, 1u);
    StateDict state = row_state(comm, 3);
    state["step"] = Value(comm.rank());
    session.save(state, at[2], options);
  });
  EXPECT_THAT(texts, Each(HasSubstr("the common state of rank 1 differs from that of rank 0")));
  expect_rows(at[1], 5, 2);
}

TEST(Session, AFormatOfGridsTakesItsGridsFromTheEarlierSave) {
  const std::vector<Location> at = memory_locations(2);
  run_ranks(2, [&](const Communicator& comm) {
    Session session(comm, kSeconds);
    SaveOptions options = within_seconds();
    options.format = zarr_format();
    options.dialect = megatron_dialect();
    for (int64_t i = 0; i < 2; ++i) {
      session.save(row_state(comm, i), at[static_cast<size_t>(i)], options);
    }
    EXPECT_EQ(session.stats().plans_from_cache, 1u);
  });
  for (int64_t i = 0; i < 2; ++i) expect_rows(at[static_cast<size_t>(i)], i, 2);
}

TEST(Session, ATimeoutThatIsNoneIsRefusedOnAllRanks) {
  for (const double timeout : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN()}) {
    expect_error([&] { Session(solo(), timeout); }, ErrorCode::kInvalidArgument, "timeout is");
    const auto texts = failures(
        2, [&](const Communicator& comm) { Session(comm, comm.rank() == 1 ? timeout : kSeconds); });
    EXPECT_THAT(texts, Each(AllOf(HasSubstr("timeout is"), HasSubstr("rank 1"))));
  }
}

// ---- By files

TEST(Session, ByFilesRanksCountTheirSavesByLocation) {
  const TempDirectory folder;
  const std::vector<Location> at = {folder.path() + "/a", folder.path() + "/b",
                                    folder.path() + "/c"};
  const auto body = [&](Session& session, const Communicator& comm) {
    // Rank 1 skips a save to another location; this does not shift the numbers here.
    if (comm.rank() == 0) {
      SaveOptions alone = within_seconds();
      alone.by_files = session.by_files(at[0]);
      alone.by_files->wait = false;
      EXPECT_FALSE(session.save(row_state(comm, 1), at[0], alone).published);
    }
    SaveOptions options = within_seconds();
    options.by_files = session.by_files(at[1]);
    EXPECT_EQ(options.by_files->number, 0u);
    EXPECT_TRUE(session.save(row_state(comm, 2), at[1], options).published);
    EXPECT_EQ(session.by_files(at[1]).number, 1u);
  };
  run_ranks(2, [&](const Communicator& comm) {
    Session session(comm, kSeconds);
    body(session, comm);
  });
  expect_rows(at[1], 2, 2);
  run_ranks(2, [&](const Communicator& comm) {
    Session session(comm.rank(), comm.size(), "a run of a test");
    const StateDict state = row_state(comm, 3);
    EXPECT_TRUE(begin_save(session, state, at[2], within_seconds())
                    .stage()
                    .write()
                    .report()
                    .publish()
                    .published);
  });
  expect_rows(at[2], 3, 2);
}

TEST(Session, ByFilesSavesThroughALinkAreSavesToTheDirectory) {
  const TempDirectory folder;
  const auto path = [&](const char* name) { return folder.path() + "/" + name; };
  std::filesystem::create_directory_symlink("real", path("link"));  // leads to nothing yet
  std::filesystem::create_directory_symlink(folder.path(), path("folder"));
  Session session(0, 1, "a run through links");
  EXPECT_EQ(session.by_files(path("link/x")).number, 0u);
  EXPECT_EQ(session.by_files(path("link")).number, 0u);
  EXPECT_EQ(session.by_files(path("real")).number, 1u);
  std::filesystem::create_directory(path("real"));
  EXPECT_EQ(session.by_files(path("link")).number, 2u);
  EXPECT_EQ(session.by_files(path("folder/real/")).number, 3u);
  EXPECT_EQ(session.by_files(path("folder/link/../real/new")).number, 0u);
  EXPECT_EQ(session.by_files(path("link/new")).number, 1u);
}

// ---- Memory

TEST(Session, StagingMemoryIsThatOfTheLastSaveUnlessThatIsOnItsWay) {
  engine::SessionParts parts;
  auto first = parts.lend_memory();
  first->reserve(1 << 20, nullptr);
  const void* const begin = first->take(1, std::nullopt).data();
  EXPECT_EQ(parts.lend_memory()->capacity(), 0u);
  first.reset();
  first = parts.lend_memory();
  first->reserve(1 << 19, nullptr);
  EXPECT_EQ(first->take(1, std::nullopt).data(), begin);
}

TEST(Session, ThreadsAndBuffersAreThoseOfTheLastSaveWhereItAskedForTheSame) {
  engine::KeptResources kept;
  const auto buffers = kept.buffers(1 << 24, 2, 1 << 20);
  EXPECT_EQ(kept.buffers(1 << 24, 2, 1 << 20), buffers);
  EXPECT_NE(kept.buffers(1 << 25, 2, 1 << 25), buffers);
  const auto threads = kept.threads(1);
  EXPECT_EQ(kept.threads(1), threads);
  EXPECT_EQ(kept.threads(2)->size(), 2u);
}

TEST(Session, PreparedMemoryIsEnoughForWhatIsSaved) {
  const std::vector<Location> at = memory_locations(2);
  Session session(solo());
  const StateDict state = row_state(solo(), 4);
  const uint64_t bytes = session.prepare(state);
  EXPECT_GE(bytes, 32u + 24u);
  for (const Location& location : at) {
    SteppedSave planned = begin_save(session, state, location, within_seconds());
    EXPECT_LE(planned.bytes(), bytes);
    planned.stage().write().report().publish();
    expect_rows(location, 4, 1);
  }
}

// Two simultaneous saves of one session have separate memory.
TEST(Session, ASaveOnItsWayKeepsWhatItStaged) {
  const std::vector<Location> at = memory_locations(2);
  Session session(0, 1, "a run of a test");
  SteppedSave first = begin_save(session, row_state(solo(), 4), at[0], within_seconds()).stage();
  begin_save(session, row_state(solo(), 9), at[1], within_seconds())
      .stage()
      .write()
      .report()
      .publish();
  first.write().report().publish();
  expect_rows(at[0], 4, 1);
  expect_rows(at[1], 9, 1);
}

TEST(Session, NothingIsPreparedForASaveThatWouldBeRefused) {
  Session with_ranks(solo());
  Session by_files(0, 1, "a run of a test");
  SaveOptions options;
  options.format = zarr_format();
  EXPECT_GT(with_ranks.prepare(row_state(solo(), 4), options), 0u);
  expect_error([&] { by_files.prepare(row_state(solo(), 4), options); }, ErrorCode::kUnsupported,
               "the format zarr can't be saved without a communicator");
  options = SaveOptions();
  options.resources.threads = -1;
  for (Session* session : {&with_ranks, &by_files}) {
    expect_error([&] { session->prepare(row_state(solo(), 4), options); },
                 ErrorCode::kInvalidArgument, "threads is -1");
  }
}

}  // namespace tilestone::session_test
