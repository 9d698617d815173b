#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <new>

#include "tilestone/base/error_testing.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/load/load_internal.h"
#include "tilestone/engine/save/request_internal.h"
#include "tilestone/engine/save/save_steps_internal.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::options_test {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr int kRanks = 3;
constexpr int kFailing = 1;

template <typename Options>
struct BadNumber {
  std::vector<std::string> facts;  // what the message mentions
  std::function<void(Options&)> set;
};

// Bad values of the options that all three structs have.
template <typename Options>
std::vector<BadNumber<Options>> common() {
  return {
      {{"resources.threads", "-1", "1 to 1024"}, [](Options& o) { o.resources.threads = -1; }},
      {{"resources.threads", "1025"}, [](Options& o) { o.resources.threads = 1025; }},
      {{"resources.buffer_bytes", "0", "131072"}, [](Options& o) { o.resources.buffer_bytes = 0; }},
      {{"resources.buffer_bytes", "131071"},
       [](Options& o) { o.resources.buffer_bytes = kMinBufferBytes - 1; }},
      {{"resources.buffer_bytes", "18446744073709551615"},
       [](Options& o) { o.resources.buffer_bytes = UINT64_MAX; }},
  };
}

template <typename Options>
std::vector<BadNumber<Options>> with_timeouts() {
  auto all = common<Options>();
  all.push_back({{"timeout", "-1", "0"}, [](Options& o) { o.timeout = -1; }});
  all.push_back({{"timeout", "0", "0"}, [](Options& o) { o.timeout = 0; }});
  all.push_back({{"timeout", "nan", "0"}, [](Options& o) { o.timeout = NAN; }});
  all.push_back({{"timeout", "-inf", "0"}, [](Options& o) { o.timeout = -INFINITY; }});
  return all;
}

TEST(Options, ABadNumberOnOneRankIsRefusedByNameOnEveryRankOfASave) {
  auto bad = with_timeouts<SaveOptions>();
  bad.push_back({{"resources.files_per_rank", "0", "1 to 1024"},
                 [](SaveOptions& options) { options.resources.files_per_rank = 0; }});
  bad.push_back({{"resources.files_per_rank", "-3"},
                 [](SaveOptions& options) { options.resources.files_per_rank = -3; }});
  bad.push_back({{"resources.files_per_rank", "2147483647"},
                 [](SaveOptions& options) { options.resources.files_per_rank = 2147483647; }});
  const auto storage = memory_storage();
  for (const auto& number : bad) {
    const auto texts = failures(kRanks, [&](Communicator comm) {
      SaveOptions options;
      options.comm = comm;
      if (comm.rank() == kFailing) number.set(options);
      save(row_state(comm, 1), Location(storage), options);
    });
    EXPECT_THAT(texts, Each(AllOf(MentionsAll(number.facts), HasSubstr("rank 1"))));
  }
  EXPECT_THAT(storage->list(), IsEmpty());
}

TEST(Options, ABadNumberOnOneRankIsRefusedByNameOnEveryRankOfALoad) {
  const auto storage = memory_storage();
  save(row_state(Communicator(), 1), Location(storage));
  for (const auto& number : with_timeouts<LoadOptions>()) {
    const auto texts = failures(kRanks, [&](Communicator comm) {
      LoadOptions options;
      options.comm = comm;
      if (comm.rank() == kFailing) number.set(options);
      load(StateDict(), Location(storage), options);
    });
    EXPECT_THAT(texts, Each(AllOf(MentionsAll(number.facts), HasSubstr("rank 1"))));
  }
  for (const auto& number : common<OpenOptions>()) {
    OpenOptions options;
    number.set(options);
    const Error error = error_of([&] { Checkpoint::open(Location(storage), options); });
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.message(), MentionsAll(number.facts));
  }
}

TEST(Options, TheSmallestNumbersSaveLoadAndVerify) {
  const TempDirectory folder;
  run_ranks(kRanks, [&](Communicator comm) {
    SaveOptions saving;
    saving.comm = comm;
    saving.resources.buffer_bytes = kMinBufferBytes;
    saving.resources.files_per_rank = 5;
    saving.resources.threads = 1;
    saving.timeout = kNoTimeout;
    const auto fill = [&](bool data) {
      StateDict state;
      for (int i = 0; i < 12; ++i) {
        const std::string key = "w" + std::to_string(i);
        const Dims shape = {1, 70'001};
        TensorView part = data ? counting(DType::kInt64, shape, comm.rank() * 1000 + i)
                               : TensorView::without_data(DType::kInt64, shape);
        state[key] =
            ShardedTensor::from_rank_offsets(key, std::move(part), {{0, comm.rank(), comm.size()}});
      }
      return state;
    };
    save(fill(true), folder.path(), saving);
    for (const auto way : {Reading::TwoPhase::kAuto, Reading::TwoPhase::kAlways}) {
      LoadOptions loading;
      loading.comm = comm;
      loading.resources.buffer_bytes = kMinBufferBytes;
      loading.resources.threads = 8;
      loading.reading.two_phase = way;
      const StateDict loaded = load(fill(false), folder.path(), loading);
      for (int i = 0; i < 12; ++i) {
        const auto* tensor = loaded.find("w" + std::to_string(i))->get_if<ShardedTensor>();
        EXPECT_EQ(elements(tensor->data),
                  elements(counting(DType::kInt64, {1, 70'001}, comm.rank() * 1000 + i)));
      }
    }
  });
  OpenOptions open;
  open.resources.buffer_bytes = kMinBufferBytes;
  open.resources.threads = 8;
  EXPECT_TRUE(Checkpoint::open(folder.path(), open).verify().ok());
}

// Failures on one rank before it has a state, a location or options.
TEST(Options, TheErrorOfARequestThatCantBeMadeReachesEveryRank) {
  const auto storage = memory_storage();
  const auto save_texts = failures(kRanks, [&](Communicator comm) {
    const StateDict state = row_state(comm, 1);
    const Location location(storage);
    SaveOptions options;
    options.comm = comm;
    engine::MadeRequest made = engine::RequestView{&state, &location, &options};
    if (comm.rank() == kFailing) made = Error(ErrorCode::kInvalidArgument, "no such tree");
    save_in_a_row({location, options, Deadline::after(std::chrono::seconds(60))}, made);
  });
  EXPECT_THAT(save_texts, Each(AllOf(HasSubstr("no such tree"), HasSubstr("rank 1"))));
  EXPECT_THAT(storage->list(), IsEmpty());

  run_ranks(kRanks, [&](Communicator comm) {
    SaveOptions options;
    options.comm = comm;
    save(row_state(comm, 1), Location(storage), options);
  });
  const auto load_texts = failures(kRanks, [&](Communicator comm) {
    const StateDict wanted = row_template(comm);
    const Location location(storage);
    const LoadOptions options;
    engine::LoadByRounds load(comm, location.identity_or_empty(),
                              Deadline::after(std::chrono::seconds(60)));
    load.read(engine::LoadView{&wanted, &location, &options}, false);
    std::optional<Error> failed;
    if (comm.rank() == kFailing) failed.emplace(ErrorCode::kInvalidArgument, "no place for it");
    load.finish(failed);
  });
  EXPECT_THAT(load_texts, Each(AllOf(HasSubstr("no place for it"), HasSubstr("rank 1"))));
}

}  // namespace tilestone::options_test
