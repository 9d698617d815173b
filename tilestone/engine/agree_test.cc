#include "tilestone/engine/agree.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <stdexcept>

#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/engine_testing.h"

namespace tilestone::engine::agree_test {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;

constexpr int kRanks = 3;

Deadline plenty() { return Deadline::after(std::chrono::seconds(60)); }

Bytes bytes_of(const std::string& text) {
  const auto* data = reinterpret_cast<const std::byte*>(text.data());
  return Bytes(data, data + text.size());
}
std::string text_of(const Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Two rounds: each rank sends its number, then the answer of the first round with its number.
Bytes say(const Communicator& comm, const Bytes& answer) {
  return bytes_of(text_of(answer) + std::to_string(comm.rank()));
}
Decision join(int round, const std::vector<Bytes>& said) {
  std::string all = "<";
  for (const Bytes& each : said) all += text_of(each);
  return {bytes_of(all), round == 1};
}

TEST(Agree, EveryRankGetsTheAnswerOfTheLastRound) {
  run_ranks(kRanks, [](const Communicator& comm) {
    const Bytes answer = agree(
        comm, "a test", plenty(), [&](int, const Bytes& before) { return say(comm, before); },
        [](int round, const std::vector<Bytes>& said) { return join(round, said); });
    EXPECT_EQ(text_of(answer), "<<0120<0121<0122");
  });
  const Bytes alone = agree(
      solo(), "a test", plenty(), [&](int, const Bytes& before) { return say(solo(), before); },
      [](int round, const std::vector<Bytes>& said) { return join(round, said); });
  EXPECT_EQ(text_of(alone), "<<00");
}

TEST(Agree, WhatOneRankThrowsInAnyRoundEveryRankThrows) {
  for (const int failing : {0, 1}) {
    const auto texts = failures(kRanks, [failing](const Communicator& comm) {
      agree(
          comm, "a test", plenty(),
          [&](int round, const Bytes&) -> Bytes {
            if (round == failing && comm.rank() == 2) {
              throw Error(ErrorCode::kMismatch, "no such shape");
            }
            return {};
          },
          [](int round, const std::vector<Bytes>&) { return Decision{{}, round == 1}; });
    });
    EXPECT_THAT(texts, Each(AllOf(HasSubstr("no such shape"), HasSubstr("rank 2"))));
  }
}

TEST(Agree, WhatTheCoordinatorCannotDecideEveryRankThrows) {
  const auto texts = failures(kRanks, [](const Communicator& comm) {
    agree(
        comm, "a test", plenty(), [](int, const Bytes&) { return Bytes(); },
        [](int, const std::vector<Bytes>&) -> Decision {
          throw Error(ErrorCode::kInvalidArgument, "they contradict each other");
        });
  });
  EXPECT_THAT(texts, Each(HasSubstr("they contradict each other")));
}

}  // namespace tilestone::engine::agree_test
