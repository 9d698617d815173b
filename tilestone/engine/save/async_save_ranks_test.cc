// Asynchronous saves of several ranks: calls that do not fit, and what ranks must agree on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <thread>

#include "tilestone/comm/communicator.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/save/async_save.h"
#include "tilestone/engine/save/save_steps_testing.h"
#include "tilestone/engine/session.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::async_save_ranks_test {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;

SaveOptions options_of(const Communicator& comm) {
  SaveOptions options;
  options.comm = comm;
  options.overwrite = true;
  options.timeout = 60;
  options.resources.threads = 1;
  options.resources.buffer_bytes = 1u << 20;
  return options;
}

enum class Verb { kSave, kBeginSave, kAsyncSave, kLoad };
constexpr Verb kVerbs[] = {Verb::kSave, Verb::kBeginSave, Verb::kAsyncSave, Verb::kLoad};

// What errors call it. The steps of a save in a row are a save.
std::string name_of(Verb verb) {
  if (verb == Verb::kAsyncSave) return "async_save";
  return verb == Verb::kLoad ? "load" : "save";
}

void call(Verb verb, const Communicator& comm, const Location& location, int64_t first) {
  const SaveOptions options = options_of(comm);
  switch (verb) {
    case Verb::kSave:
      save(row_state(comm, first), location, options);
      return;
    case Verb::kBeginSave:
      begin_save(row_state(comm, first), location, options).stage().write().report().publish();
      return;
    case Verb::kAsyncSave:
      async_save(row_state(comm, first), location, options).result();
      return;
    case Verb::kLoad:
      LoadOptions loading;
      loading.comm = comm;
      loading.timeout = 60;
      load(row_template(comm), location, loading);
      return;
  }
}

// Both ranks get the same error, which says what each has called. A rank that waited in its call
// would get kTimeout instead.
void expect_refused(Verb first, Verb second, const Communicator& comm, const Location& location) {
  try {
    call(comm.rank() == 0 ? first : second, comm, location, 2);
    ADD_FAILURE() << "no error on rank " << comm.rank();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kMismatch) << error.what();
    EXPECT_THAT(error.what(), AllOf(HasSubstr("rank 0: " + name_of(first) + " at"),
                                    HasSubstr("rank 1: " + name_of(second) + " at")));
  }
}

TEST(AsyncSaveRanks, RanksThatMakeDifferentCallsAtOnePlaceFailAtOnceAndTheNextCallWorks) {
  for (const Verb first : kVerbs) {
    for (const Verb second : kVerbs) {
      SCOPED_TRACE(name_of(first) + " and " + name_of(second));
      const Location location(memory_storage());
      const auto texts = failures(2, [&](const Communicator& comm) {
        call(Verb::kSave, comm, location, 1);
        for (int time = 0; time < 2; ++time) {
          if (name_of(first) == name_of(second)) {
            call(comm.rank() == 0 ? first : second, comm, location, 2);
          } else {
            expect_refused(first, second, comm, location);
          }
        }
        call(Verb::kAsyncSave, comm, location, 3);
        call(Verb::kLoad, comm, location, 3);
      });
      EXPECT_THAT(texts, Each(std::string()));
      expect_rows(location, 3, 2);
    }
  }
}

TEST(AsyncSaveRanks, OnErrorAndInFlightMustBeEqualOnAllRanks) {
  using Async = AsyncOptions;
  const std::pair<AsyncOptions, const char*> kinds[] = {
      {{.on_error = Async::OnError::kWarn}, "on_error (rank 0: \"raise\"; rank 1: \"warn\")"},
      {{.in_flight = Async::InFlight::kFail}, "in_flight (rank 0: \"wait\"; rank 1: \"fail\")"},
      {{.in_flight = Async::InFlight::kSkip}, "in_flight (rank 0: \"wait\"; rank 1: \"skip\")"}};
  const Location location(memory_storage());
  const auto texts = failures(2, [&](const Communicator& comm) {
    for (const auto& [other, text] : kinds) {
      const AsyncOptions mine = comm.rank() == 0 ? AsyncOptions() : other;
      expect_error([&] { async_save(row_state(comm, 1), location, options_of(comm), mine); },
                   ErrorCode::kMismatch, text);
    }
    async_save(row_state(comm, 2), location, options_of(comm)).result();
  });
  EXPECT_THAT(texts, Each(std::string()));
  expect_rows(location, 2, 2);
}

// One rank saves in the session whose save has failed, the other without a session.
TEST(AsyncSaveRanks, AnEarlierFailureIsThrownAlsoOnARankThatSavesWithoutTheSession) {
  const auto disk = FaultDisk::create(memory_storage(), [](const StorageCall& call) {
    const bool fails =
        call.client == 1 && call.op == StorageOp::kAppend && call.name.ends_with(".distcp");
    return fails ? FaultAction::fail(ENOSPC) : FaultAction::pass();
  });
  const Location other(memory_storage());
  const auto texts = failures(2, [&](const Communicator& comm) {
    Session session(comm);
    const Location full(disk->storage(comm.rank()));
    const AsyncSave failed = session.async_save(row_state(comm, 1), full, options_of(comm));
    while (!failed.durable().done()) std::this_thread::yield();
    expect_error(
        [&] {
          comm.rank() == 0 ? session.save(row_state(comm, 2), other, options_of(comm))
                           : save(row_state(comm, 2), other, options_of(comm));
        },
        ErrorCode::kIo, "an earlier asynchronous save has failed");
    save(row_state(comm, 3), other, options_of(comm));
  });
  EXPECT_THAT(texts, Each(std::string()));
  expect_rows(other, 3, 2);
}

TEST(AsyncSaveRanks, ARankThatAsksForAFailureDoesSoForItselfOnly) {
  const auto disk = FaultDisk::create(memory_storage(), [](const StorageCall& call) {
    const bool fails =
        call.client == 1 && call.op == StorageOp::kAppend && call.name.ends_with(".distcp");
    return fails ? FaultAction::fail(ENOSPC) : FaultAction::pass();
  });
  const Location other(memory_storage());
  const auto texts = failures(2, [&](const Communicator& comm) {
    Session session(comm);
    const Location full(disk->storage(comm.rank()));
    for (const bool all_ask : {false, true}) {
      const AsyncSave failed = session.async_save(row_state(comm, 1), full, options_of(comm));
      if (all_ask || comm.rank() == 0) expect_error([&] { failed.result(); }, ErrorCode::kIo, "");
      if (!all_ask) {
        expect_error([&] { session.save(row_state(comm, 2), other, options_of(comm)); },
                     ErrorCode::kIo, "an earlier asynchronous save has failed");
      }
      session.save(row_state(comm, 3), other, options_of(comm));
    }
  });
  EXPECT_THAT(texts, Each(std::string()));
  expect_rows(other, 3, 2);
}

bool is_receipt(std::string_view name) { return name.find("receipt") != std::string_view::npos; }

// The rename is done, but its answer is lost, as over a network. The coordinator may have read the
// receipt, so its rank must not remove what the receipt names.
TEST(AsyncSaveRanks, ARankWhoseReceiptIsThereAlthoughItsAnswerIsLostKeepsItsFiles) {
  const auto disk = FaultDisk::create(memory_storage(), [](const StorageCall& call) {
    const bool lost = call.client == 1 && call.op == StorageOp::kRename && is_receipt(call.to);
    return lost ? FaultAction::fail_after(EIO) : FaultAction::pass();
  });
  const auto texts = failures(2, [&](const Communicator& comm) {
    const Location location(disk->storage(comm.rank()));
    EXPECT_TRUE(async_save(row_state(comm, 1), location, options_of(comm)).result().published);
  });
  EXPECT_THAT(texts, Each(std::string()));
  expect_rows(Location(disk->storage(2)), 1, 2);
}

TEST(AsyncSaveRanks, ARankThatCantWriteSaysSoAlsoIfItCantLookForItsReceipt) {
  const auto disk = FaultDisk::create(memory_storage(), [](const StorageCall& call) {
    const bool writes = call.op == StorageOp::kAppend && call.name.ends_with(".distcp");
    const bool looks = call.op == StorageOp::kStat && is_receipt(call.name);
    const bool fails = call.client == 1 && (writes || looks);
    return fails ? FaultAction::fail(EIO) : FaultAction::pass();
  });
  const auto texts = failures(2, [&](const Communicator& comm) {
    const Location location(disk->storage(comm.rank()));
    async_save(row_state(comm, 1), location, options_of(comm)).result();
  });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("append"), HasSubstr("(rank 1)"))));
}

// A rank that can write nothing at the location, from some point of the save on.
std::shared_ptr<FaultDisk> blind_disk(StorageOp first) {
  const auto blind = std::make_shared<std::atomic<bool>>(false);
  return FaultDisk::create(memory_storage(), [=](const StorageCall& call) {
    if (call.client != 1) return FaultAction::pass();
    if (call.op == first && (is_receipt(call.name) || call.name.ends_with(".distcp"))) {
      *blind = true;
    }
    return *blind && changes_storage(call.op) ? FaultAction::fail(EROFS) : FaultAction::pass();
  });
}

TEST(AsyncSaveRanks, ARankThatCantWriteAtAllFailsTheCallOnAllRanks) {
  for (const auto on_error : {AsyncOptions::OnError::kRaise, AsyncOptions::OnError::kWarn}) {
    const auto disk = blind_disk(StorageOp::kCreate);
    const auto texts = failures(3, [&](const Communicator& comm) {
      const Location location(disk->storage(comm.rank()));
      // With kWarn the failure is the result: it is known when the call returns.
      const AsyncSave saving =
          async_save(row_state(comm, 1), location, options_of(comm), {.on_error = on_error});
      EXPECT_TRUE(saving.durable().done());
      saving.result();
    });
    EXPECT_THAT(texts, Each(AllOf(HasSubstr("cannot create"), HasSubstr("(rank 1)"))));
    EXPECT_THAT(disk->storage(0)->list(), testing::IsEmpty());
  }
}

// Rank 1 fails at once, and can't leave its failure. The others would wait for 54 seconds.
TEST(AsyncSaveRanks, WhatARankCouldNotTellOfItsFailureAllHearInTheNextSave) {
  using Async = AsyncOptions;
  const auto next = [](Async::OnError on_error, Async::InFlight in_flight) {
    const auto disk = blind_disk(StorageOp::kAppend);
    const Location other(memory_storage());
    const auto texts = failures(3, [&](const Communicator& comm) {
      Session session(comm);
      const Location location(disk->storage(comm.rank()));
      const AsyncOptions async{.on_error = on_error, .in_flight = in_flight};
      const AsyncSave failed =
          session.async_save(row_state(comm, 1), location, options_of(comm), async);
      while (comm.rank() == 1 && !failed.durable().done()) std::this_thread::yield();
      if (on_error == Async::OnError::kRaise) {
        expect_error(
            [&] { session.async_save(row_state(comm, 2), other, options_of(comm), async); },
            ErrorCode::kIo, "an earlier asynchronous save has failed");
        EXPECT_TRUE(failed.durable().done());
        expect_error([&] { failed.result(); }, ErrorCode::kIo, "(rank 1)");
      }
      EXPECT_TRUE(session.async_save(row_state(comm, 3), other, options_of(comm), async)
                      .result()
                      .published);
      // The location is free again.
      save(row_state(comm, 4), Location(disk->storage(7 + comm.rank())), options_of(comm));
    });
    EXPECT_THAT(texts, Each(std::string()));
    expect_rows(other, 3, 3);
  };
  next(Async::OnError::kRaise, Async::InFlight::kWait);
  next(Async::OnError::kWarn, Async::InFlight::kSkip);
}

}  // namespace tilestone::async_save_ranks_test
