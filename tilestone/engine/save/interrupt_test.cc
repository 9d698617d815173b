// Work that its caller ends: by an exception from the caller's own code, or by an interrupt.
#include "tilestone/base/deadline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>
#include <string>
#include <vector>

#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/engine_testing.h"

namespace tilestone::interrupt_test {

using testing::HasSubstr;

// Not a std::exception: the library knows nothing about it.
struct Stop {
  int number = 0;
};

enum class How { kCallbackThrows, kInterruptIsRequested };

class Ended : public testing::TestWithParam<How> {
 protected:
  // Ends the work at its first progress call.
  ProgressFn ends_at_once() {
    return [this](const Progress&) {
      if (GetParam() == How::kCallbackThrows) throw Stop{7};
      interrupt_->request(std::make_exception_ptr(Stop{7}));
    };
  }

  template <typename Work>
  static void expect_stop(const Work& work) {
    try {
      work();
      FAIL() << "the work was not ended";
    } catch (const Stop& stop) {
      EXPECT_EQ(stop.number, 7);
    }
  }

  // So many items that progress is reported long before the last one.
  static StateDict many_tensors() {
    StateDict state;
    for (int i = 0; i < 40; ++i) {
      state["t" + std::to_string(i)] = counting(DType::kUInt8, {1 << 20}, i);
    }
    return state;
  }

  // Makes every call count as slow, so that progress is reported for every item.
  static SaveOptions slow_saving() {
    SaveOptions options;
    options.resources.buffer_bytes = 1 << 20;
    return options;
  }

  std::shared_ptr<Interrupt> interrupt_ = std::make_shared<Interrupt>();
};

TEST_P(Ended, ASaveThrowsWhatEndedItAndLeavesNothingBehind) {
  const auto storage = memory_storage();
  save(row_state(solo(), 1), Location(storage));
  const std::vector<std::string> before = storage->list();
  SaveOptions options = slow_saving();
  options.overwrite = true;
  options.interrupt = interrupt_;
  options.progress = ends_at_once();
  if (GetParam() == How::kInterruptIsRequested) {
    ends_at_once()(Progress());  // before the first byte: a save can be ended at any time
  }
  expect_stop([&] { save(many_tensors(), Location(storage), options); });
  EXPECT_EQ(storage->list(), before);
  expect_rows(Location(storage), 1, 1);
}

TEST_P(Ended, ALoadThrowsWhatEndedIt) {
  const Location location(memory_storage());
  save(row_state(solo(), 1), location);
  LoadOptions options;
  options.interrupt = interrupt_;
  options.progress = ends_at_once();
  if (GetParam() == How::kInterruptIsRequested) ends_at_once()(Progress());
  expect_stop([&] { load(row_template(solo()), location, options); });
}

TEST_P(Ended, ReadsAndVerifyThrowWhatEndedThem) {
  const Location location(memory_storage());
  save(row_state(solo(), 1), location);
  const Checkpoint open = Checkpoint::open(location).with_interrupt(interrupt_);
  if (GetParam() == How::kInterruptIsRequested) {
    ends_at_once()(Progress());
    expect_stop([&] { open.read("w"); });
  }
  expect_stop([&] { open.verify(ends_at_once()); });
}

INSTANTIATE_TEST_SUITE_P(, Ended, testing::Values(How::kCallbackThrows, How::kInterruptIsRequested),
                         [](const auto& param) {
                           return param.param == How::kCallbackThrows ? "ByItsCallback"
                                                                      : "ByAnInterrupt";
                         });

// Rank 1 of three throws. `body` runs on each rank.
void expect_stop_of_rank_one(const std::function<void(Communicator)>& body) {
  const auto texts = failures(3, [&](Communicator comm) {
    const int rank = comm.rank();
    try {
      body(comm);
    } catch (const Stop&) {
      throw Error(ErrorCode::kInvalidArgument, "itself").with_rank(rank);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInterrupted) << error.what();
      throw;
    }
  });
  EXPECT_EQ(texts[1], "itself (rank 1)");
  for (const int rank : {0, 2}) {
    EXPECT_THAT(texts[static_cast<size_t>(rank)], HasSubstr("(rank 1)"));
    EXPECT_THAT(texts[static_cast<size_t>(rank)], HasSubstr("an exception of an unknown type"));
  }
}

TEST(CallersException, OfAProgressFunctionEndsTheSaveOnEveryRank) {
  const Location location(memory_storage());
  expect_stop_of_rank_one([&](Communicator comm) {
    SaveOptions options;
    options.comm = comm;
    if (comm.rank() == 1) options.progress = [](const Progress&) { throw Stop(); };
    save(row_state(comm, 1), location, options);
  });
  EXPECT_TRUE(location.storage().list(".metadata").empty());
}

TEST(CallersException, OfAFactoryEndsTheSaveAndTheLoadOnEveryRank) {
  const Location location(memory_storage());
  run_ranks(3, [&](Communicator comm) {
    SaveOptions options;
    options.comm = comm;
    save(row_state(comm, 1), location, options);
  });
  const auto state_of = [](const Communicator& comm) {
    StateDict state = row_state(comm, 1);
    if (comm.rank() == 1) {
      ShardedTensorFactory factory;
      factory.key = "built";
      factory.build = [](auto&&...) -> StateNode { throw Stop(); };
      state["built"] = std::move(factory);
    }
    return state;
  };
  expect_stop_of_rank_one([&](Communicator comm) {
    SaveOptions options;
    options.comm = comm;
    options.overwrite = true;
    save(state_of(comm), location, options);
  });
  expect_stop_of_rank_one([&](Communicator comm) {
    LoadOptions options;
    options.comm = comm;
    load(state_of(comm), location, options);
  });
}

}  // namespace tilestone::interrupt_test
