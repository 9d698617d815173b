#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>

#include "tilestone/comm/rendezvous_internal.h"

namespace tilestone::comm_internal::rendezvous_test {

using Hellos = std::vector<std::optional<Hello>>;

constexpr Fate kWait = Fate::kWait, kGo = Fate::kGo, kMismatch = Fate::kMismatch;

// The hello of a rank that saves at `location`.
Hello at(const std::string& location) {
  Hello hello;
  hello.work = "save";
  hello.location = location;
  return hello;
}

TEST(Rendezvous, WaitsForWhoIsMissingAndGoesWhenAllAreHere) {
  EXPECT_EQ(decide({at("a"), std::nullopt, at("a")}), kWait);
  EXPECT_EQ(decide({at("a"), at("a"), at("a")}), kGo);
}

TEST(Rendezvous, ARankWithoutAPlaceFitsEveryPlaceButNotEveryWork) {
  EXPECT_EQ(decide({at("a"), at(""), at("a")}), kGo);
  EXPECT_EQ(decide({at(""), at("a"), at("b")}), kMismatch);
  Hello load = at("");
  load.work = "load";
  EXPECT_EQ(decide({at("a"), load}), kMismatch);
}

TEST(Rendezvous, AContradictionCountsOnceAllAreHere) {
  EXPECT_EQ(decide({at("a"), at("b"), std::nullopt}), kWait);
  EXPECT_EQ(decide({at("a"), at("b"), at("a")}), kMismatch);
}

TEST(Rendezvous, WhoLeftFailsTheCallOnceAllHaveCome) {
  Hello left = at("a");
  left.left = Error(ErrorCode::kInterrupted, "stopped");
  EXPECT_EQ(decide({at("a"), left, std::nullopt}), kWait);
  EXPECT_EQ(decide({at("a"), left, at("a")}), Fate::kLeft);
}

Hello away_from(const std::string& location) {
  Hello away = at(location);
  away.left = Error(ErrorCode::kInterrupted, "stopped");
  away.may_return = true;
  return away;
}

TEST(Rendezvous, WhoLeftBeforeIsWaitedForByAllOthersAndMayComeAgain) {
  EXPECT_EQ(decide({at("a"), away_from("a"), std::nullopt}), kWait);
  EXPECT_EQ(decide({at("a"), away_from("a"), at("a")}), Fate::kAway);
  EXPECT_EQ(decide({at("a"), at("a"), at("a")}), kGo);
}

TEST(Rendezvous, WhoLeftBeforeIsNoEvidenceInAContradiction) {
  EXPECT_EQ(decide({at("a"), away_from("a"), at("b")}), kWait);
  EXPECT_EQ(who_is_where({at("a"), away_from("a")}), "rank 0: save at a");
}

// Random ranks: missing, arrived at one of a few calls, left or away.
Hellos random_hellos(std::mt19937_64& random) {
  constexpr const char* kLocations[] = {"a", "a", "a", "b", ""};
  const auto location = [&] { return kLocations[random() % 5]; };
  Hellos hellos(2 + random() % 4);
  for (auto& hello : hellos) {
    const uint64_t what = random() % 12;
    if (what == 0) continue;
    hello = what == 1 ? away_from(location()) : at(location());
    if (what == 2) hello->left = Error(ErrorCode::kInterrupted, "stopped");
  }
  return hellos;
}

size_t count(const Hellos& hellos, const std::function<bool(const Hello&)>& is) {
  return static_cast<size_t>(std::count_if(hellos.begin(), hellos.end(),
                                           [&](const auto& hello) { return hello && is(*hello); }));
}

TEST(Rendezvous, WhateverRanksDoTheyGoTogetherAndNobodyGoesWithoutARankThatLeft) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 20000; ++round) {
    const Hellos hellos = random_hellos(random);
    const Fate fate = decide(hellos);
    const size_t away = count(hellos, [](const Hello& hello) { return hello.may_return; });
    const size_t left = count(hellos, [](const Hello& h) { return h.left && !h.may_return; });
    const size_t here = count(hellos, [](const Hello& hello) { return !hello.may_return; });
    const bool all_here = here == hellos.size(), others_here = here + away == hellos.size();
    EXPECT_TRUE(fate != kGo || (left == 0 && all_here)) << "round " << round;
    EXPECT_TRUE(fate != Fate::kLeft || (left > 0 && all_here)) << "round " << round;
    EXPECT_TRUE(fate != Fate::kAway || (away > 0 && others_here)) << "round " << round;
    if (fate != Fate::kAway && fate != Fate::kLeft) continue;
    Hellos back = hellos;  // the ranks that left arrive again, at the call of the others
    for (auto& hello : back) {
      if (hello->left) hello = at("");
    }
    EXPECT_EQ(decide(back), kGo) << "round " << round;
    for (size_t rank = 0; rank < hellos.size(); ++rank) {  // if one rank is missing, all wait
      Hellos fewer = hellos;
      fewer[rank].reset();
      EXPECT_EQ(decide(fewer), kWait);
    }
  }
}

TEST(Rendezvous, SaysWhoIsInWhichCall) {
  Hello load = at("b");
  load.work = "load";
  EXPECT_EQ(who_is_where({at("a"), load, std::nullopt, at("a"), at("")}),
            "ranks 0 and 3: save at a; rank 1: load at b; rank 4: save");
}

TEST(Rendezvous, AHelloTravels) {
  Hello sent = at("a");
  sent.last_operation = 3;
  const Hello came = Hello::decode(sent.encode());
  EXPECT_EQ(came.name(), "save at a");
  EXPECT_EQ(came.last_operation, 3);
}

}  // namespace tilestone::comm_internal::rendezvous_test
