// Saves in the background.
#include "tilestone/engine/save/async_save.h"
#include "tilestone/base/error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>

#include "tilestone/base/error.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/gate_testing.h"
#include "tilestone/engine/session.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::async_save_test {

using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr int64_t kFirst = 3;

// How the ranks coordinate.
enum class Way { kRounds, kFiles };

SaveOptions options_of(Way way, const Communicator& comm, uint64_t number = 0) {
  SaveOptions options;
  options.timeout = 20;
  options.resources.threads = 2;
  if (way == Way::kFiles) {
    options.by_files = ByFiles{comm.rank(), comm.size(), "a run of a test"};
    options.by_files->number = number;
  } else {
    options.comm = comm;
  }
  return options;
}

// Sets all elements of the state's tensors to 0.
void forget(StateDict& state) {
  for (const TensorView& tensor :
       {state.get<ShardedTensor>("w").data, state.get<TensorView>("p")}) {
    std::memset(tensor.data, 0, tensor.bytes());
  }
  state = StateDict();
}

TEST(AsyncSave, TheStateMayChangeOnceTheCallReturnsAndTheCheckpointIsThatOfASave) {
  for (const Way way : {Way::kFiles, Way::kRounds}) {
    const int ranks = way == Way::kFiles ? 2 : 1;
    const auto storage = memory_storage();
    const auto texts = failures(ranks, [&](const Communicator& comm) {
      StateDict state = row_state(comm, kFirst);
      const AsyncSave saving = async_save(state, storage, options_of(way, comm));
      forget(state);
      EXPECT_TRUE(saving.staged().done());
      std::atomic<int> called = 0;
      saving.durable().on_done([&] { ++called; });
      const SaveResult result = saving.result();
      EXPECT_TRUE(saving.durable().done());
      EXPECT_EQ(result.save_id, saving.save_id());
      EXPECT_GE(result.bytes_written, saving.bytes());
      saving.durable().on_done([&] { called += 10; });  // at once
      while (called < 11) std::this_thread::yield();
      EXPECT_FALSE(saving.skipped());
    });
    EXPECT_THAT(texts, Each(std::string()));
    expect_rows(storage, kFirst, ranks);
    EXPECT_TRUE(find_leftovers(Location(storage)).empty());
  }
}

TEST(AsyncSave, WhileOneIsInFlightTheNextWaitsFailsOrIsSkippedAndLoadsSeeTheOldCheckpoint) {
  Gate gate;
  gate.open();
  Session session;
  SaveOptions options = options_of(Way::kRounds, solo());
  session.save(row_state(solo(), 1), gate.storage(), options);
  gate.close();
  options.overwrite = true;
  const AsyncSave first = session.async_save(row_state(solo(), 2), gate.storage(), options);
  gate.wait_until_one_waits();
  EXPECT_FALSE(first.durable().done());
  EXPECT_FALSE(first.durable().wait(Deadline::after(std::chrono::milliseconds(20))));
  expect_error([&] { first.result(0.01); }, ErrorCode::kTimeout, "has not ended after 0.01 s");
  expect_rows(gate.storage(), 1, 1);
  const Location other = memory_storage();
  expect_error(
      [&] {
        session.async_save(row_state(solo(), 4), other, options,
                           {.in_flight = AsyncOptions::InFlight::kFail});
      },
      ErrorCode::kAlreadyExists, "still in flight");
  const AsyncSave skipped = session.async_save(row_state(solo(), 4), other, options,
                                               {.in_flight = AsyncOptions::InFlight::kSkip});
  EXPECT_TRUE(skipped.skipped());
  EXPECT_FALSE(skipped.result().published);
  // Another session is refused by the location's lock.
  expect_error([&] { save(row_state(solo(), 4), gate.storage(), options); },
               ErrorCode::kAlreadyExists, "under way");
  std::thread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    gate.open();
  });
  const AsyncSave next = session.async_save(row_state(solo(), 5), gate.storage(), options);
  opener.join();
  EXPECT_TRUE(first.durable().done());
  EXPECT_TRUE(next.result().published);
  expect_rows(gate.storage(), 5, 1);
  EXPECT_THROW(Checkpoint::open(other), Error);
  EXPECT_TRUE(find_leftovers(Location(gate.storage())).empty());
}

TEST(AsyncSave, AFailureThatNobodyHasAskedForIsThrownByTheNextSaveOrLogged) {
  for (const Way way : {Way::kRounds, Way::kFiles}) {
    Gate gate;
    gate.open();
    Session session;
    const auto save = [&](uint64_t number, const AsyncOptions& async = {}) {
      return session.async_save(row_state(solo(), static_cast<int64_t>(number)), gate.storage(),
                                options_of(way, solo(), number), async);
    };
    gate.open_and_fail(ENOSPC);
    expect_error([&] { save(0).result(); }, ErrorCode::kIo, "No space left");
    const AsyncSave second = save(1);  // the first one was asked for
    while (!second.durable().done()) std::this_thread::yield();
    expect_error([&] { save(2); }, ErrorCode::kIo, "an earlier asynchronous save has failed");
    const AsyncSave third = save(3, {.on_error = AsyncOptions::OnError::kWarn});
    while (!third.durable().done()) std::this_thread::yield();
    gate.open();
    {
      const LoggedWarnings warnings;
      EXPECT_TRUE(
          session.save(row_state(solo(), 4), gate.storage(), options_of(way, solo(), 4)).published);
      EXPECT_THAT(warnings.texts(), testing::Contains(HasSubstr("has failed")));
    }
    expect_rows(gate.storage(), 4, 1);
  }
}

TEST(AsyncSave, AFailureThatNobodyHasHeardOfIsLoggedWhenSaveAndSessionAreGone) {
  const auto warnings_of = [&](Way way, const std::function<void(Session&, AsyncSave)>& use) {
    const auto fails = FaultDisk::create(memory_storage(), [](const StorageCall& call) {
      return call.name.ends_with(".distcp") ? FaultAction::fail(ENOSPC) : FaultAction::pass();
    });
    const LoggedWarnings warnings;
    {
      Session session;
      AsyncSave saving =
          session.async_save(row_state(solo(), 1), fails->storage(), options_of(way, solo()));
      saving.durable().wait();
      use(session, std::move(saving));
    }
    return warnings.texts();
  };
  const auto save_again = [&](Way way, Session& session) {
    const SaveOptions options = options_of(way, solo(), 1);
    expect_error([&] { session.save(row_state(solo(), 1), memory_storage(), options); },
                 ErrorCode::kIo, "No space left");
  };
  for (const Way way : {Way::kRounds, Way::kFiles}) {
    EXPECT_THAT(warnings_of(way, [](Session&, const AsyncSave&) {}),
                ElementsAre(AllOf(HasSubstr("has failed, and nobody has asked for its result"),
                                  HasSubstr("No space left"))));
    EXPECT_THAT(warnings_of(way,
                            [](Session&, const AsyncSave& saving) {
                              expect_error([&] { saving.result(); }, ErrorCode::kIo, "");
                            }),
                IsEmpty());
    EXPECT_THAT(warnings_of(way, [](Session&, const AsyncSave& saving) { saving.abandon(); }),
                IsEmpty());
    EXPECT_THAT(
        warnings_of(way, [&](Session& session, const AsyncSave&) { save_again(way, session); }),
        IsEmpty());
  }
}

TEST(AsyncSave, WithWarnAFailureOfTheStorageInTheCallIsTheResultAndOneOfTheStateIsThrown) {
  const AsyncOptions warn{.on_error = AsyncOptions::OnError::kWarn};
  const SaveOptions options = options_of(Way::kRounds, solo());
  for (const ErrorCode code : {ErrorCode::kIo, ErrorCode::kNotFound}) {
    const auto disk = FaultDisk::create(memory_storage(), [code](const StorageCall& call) {
      if (call.name.ends_with(".begun")) throw Error(code, "no disk");
      return FaultAction::pass();
    });
    Session session;
    const LoggedWarnings warnings;
    const auto save = [&](const StateDict& state, const AsyncOptions& async) {
      return session.async_save(state, disk->storage(), options, async);
    };
    const AsyncSave failed = save(row_state(solo(), 1), warn);
    EXPECT_THAT(warnings.texts(), testing::Contains(HasSubstr("on_error = warn")));
    EXPECT_TRUE(failed.durable().done());
    expect_error([&] { failed.result(); }, code, "no disk");
    expect_error([&] { save(hollow_state(), warn); }, ErrorCode::kInvalidArgument, "without data");
    expect_error([&] { save(row_state(solo(), 1), {}); }, code, "no disk");
  }
}

TEST(AsyncSave, ATargetThatHangsFailsTheSaveSoonAfterItsTimeout) {
  Gate gate;
  {
    Session session;
    SaveOptions options = options_of(Way::kRounds, solo());
    options.timeout = 0.2;
    const AsyncSave saving = session.async_save(row_state(solo(), 1), gate.storage(), options);
    expect_error([&] { saving.result(); }, ErrorCode::kTimeout, "does not answer");
    const Location other = memory_storage();
    session.save(row_state(solo(), 2), other, options_of(Way::kRounds, solo()));
    expect_rows(other, 2, 1);
    EXPECT_FALSE(saving.finished());
    gate.open();  // the thread that was stuck ends
    while (!saving.finished()) std::this_thread::yield();
  }
  EXPECT_THROW(Checkpoint::open(Location(gate.storage())), Error);
}

TEST(AsyncSave, AnAbandonedSaveLeavesTheCheckpointThatWasThere) {
  Gate gate;
  gate.open();
  SaveOptions options = options_of(Way::kRounds, solo());
  save(row_state(solo(), 1), gate.storage(), options);
  gate.close();
  options.overwrite = true;
  const AsyncSave saving = async_save(row_state(solo(), 2), gate.storage(), options);
  gate.wait_until_one_waits();
  saving.abandon();
  gate.open();
  expect_error([&] { saving.result(); }, ErrorCode::kInterrupted, "abandoned by its program");
  expect_rows(gate.storage(), 1, 1);
  save(row_state(solo(), 3), gate.storage(), options);
  expect_rows(gate.storage(), 3, 1);
}

}  // namespace tilestone::async_save_test
