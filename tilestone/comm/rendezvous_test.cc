#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <random>

#include "tilestone/comm/rendezvous_internal.h"

namespace tilestone::comm_internal::rendezvous_test {

using testing::ElementsAre;
using Hellos = std::vector<std::optional<Hello>>;

constexpr Fate kWait = Fate::kWait, kGo = Fate::kGo, kBehind = Fate::kBehind,
               kMismatch = Fate::kMismatch;

// The hello of a rank that saves at `location`. Before that it saved at `since` (newest first), and
// at `before` before the last call that all ranks made.
Hello at(const std::string& location, std::initializer_list<const char*> since = {},
         std::initializer_list<const char*> before = {}) {
  Hello hello;
  hello.work = "save";
  hello.location = location;
  for (const char* call : since) hello.recent.push_back(fingerprint("save", call));
  for (const char* call : before) hello.recent.push_back(fingerprint("save", call));
  hello.since = since.size();
  hello.agreed = 7;
  return hello;
}

std::vector<Fate> all(size_t ranks, Fate fate) { return std::vector<Fate>(ranks, fate); }

TEST(Rendezvous, WaitsForWhoIsMissingAndGoesWhenAllAreHere) {
  EXPECT_EQ(decide({at("a"), std::nullopt, at("a")}), all(3, kWait));
  EXPECT_EQ(decide({at("a"), at("a"), at("a")}), all(3, kGo));
}

TEST(Rendezvous, ARankWithoutAPlaceFitsEveryPlaceButNotEveryWork) {
  EXPECT_EQ(decide({at("a"), at(""), at("a")}), all(3, kGo));
  EXPECT_EQ(decide({at(""), at("a"), at("b")}), all(3, kMismatch));
  Hello load = at("");
  load.work = "load";
  EXPECT_EQ(decide({at("a"), load}), all(2, kMismatch));
}

TEST(Rendezvous, AContradictionCountsOnceAllAreHere) {
  EXPECT_EQ(decide({at("a"), at("b"), std::nullopt}), all(3, kWait));
  EXPECT_EQ(decide({at("a"), at("b"), at("a")}), all(3, kMismatch));
}

TEST(Rendezvous, WhoRepeatsAnOldCallIsBehind) {
  EXPECT_THAT(decide({at("b", {}, {"a"}), at("a", {}, {"a"}), at("b", {}, {"a"})}),
              ElementsAre(kWait, kBehind, kWait));
}

TEST(Rendezvous, AnotherCallAtThePlaceOfEarlierCallsIsWrongAndNobodyIsBehind) {
  Hello load = at("a", {}, {"a"});
  load.work = "load";
  EXPECT_EQ(decide({at("a", {}, {"a"}), load}), all(2, kMismatch));
  EXPECT_EQ(decide({load, load, at("a", {}, {"a"})}), all(3, kMismatch));
  // Rank 1 has come late to a save that rank 0 has left.
  Hello went_on = load;
  went_on.recent.insert(went_on.recent.begin(), fingerprint("save", "a"));
  went_on.since = 1;
  EXPECT_THAT(decide({went_on, at("a", {}, {"a"})}), ElementsAre(kWait, kBehind));
}

TEST(Rendezvous, WhoComesToACallThatOthersGaveUpIsBehindThoughSomebodyIsMissing) {
  EXPECT_THAT(decide({at("b", {"a"}), at("a"), std::nullopt}), ElementsAre(kWait, kBehind, kWait));
}

TEST(Rendezvous, WhoSkippedACallWaitsOnceTheOthersAreSeenToFollow) {
  // Rank 1 skipped b; b and c have failed.
  EXPECT_THAT(decide({at("c", {"b"}), at("d", {"c"}), at("c", {"b"})}),
              ElementsAre(kBehind, kWait, kBehind));
}

TEST(Rendezvous, CallsSinceTheLastOneOfAllCountMoreThanOlderOnes) {
  // Both locations are used in turn. Rank 1 gave up its call at b, where rank 0 has just arrived.
  EXPECT_THAT(decide({at("b", {}, {"a", "b", "a"}), at("a", {"b"}, {"a", "b", "a"})}),
              ElementsAre(kBehind, kWait));
}

TEST(Rendezvous, WithPlacesInTurnOneSideWaitsFromTheSecondCallOn) {
  EXPECT_EQ(decide({at("a", {}, {"b", "a"}), at("b", {}, {"b", "a"})}), all(2, kMismatch));
  EXPECT_THAT(decide({at("b", {"a"}, {"b", "a"}), at("a", {"b"}, {"b", "a"})}),
              ElementsAre(kWait, kBehind));
  EXPECT_THAT(decide({at("b", {"a"}), at("a", {"b"}), at("a", {"b"})}),
              ElementsAre(kBehind, kWait, kWait));
  EXPECT_THAT(decide({at("b", {"a"}), at("a", {"b", "x"}), at("b", {"a"})}),
              ElementsAre(kBehind, kWait, kBehind));
}

TEST(Rendezvous, WhoLeftFailsTheCallOnceAllHaveCome) {
  Hello left = at("a");
  left.left = Error(ErrorCode::kInterrupted, "stopped");
  EXPECT_EQ(decide({at("a"), left, std::nullopt}), all(3, kWait));
  EXPECT_EQ(decide({at("a"), left, at("a")}), all(3, Fate::kLeft));
}

Hello away_from(const std::string& location) {
  Hello away = at(location);
  away.left = Error(ErrorCode::kInterrupted, "stopped");
  away.may_return = true;
  return away;
}

TEST(Rendezvous, WhoLeftBeforeIsWaitedForByAllOthersAndMayComeAgain) {
  EXPECT_EQ(decide({at("a"), away_from("a"), std::nullopt}), all(3, kWait));
  EXPECT_EQ(decide({at("a"), away_from("a"), at("a")}), all(3, Fate::kAway));
  EXPECT_EQ(decide({at("a"), at("a"), at("a")}), all(3, kGo));
}

TEST(Rendezvous, WhoLeftBeforeIsNoEvidenceInAContradiction) {
  EXPECT_EQ(decide({at("a"), away_from("a"), at("b")}), all(3, kWait));
  EXPECT_EQ(who_is_where({at("a"), away_from("a")}), "rank 0: save at a");
}

// Random ranks: missing, arrived at one of a few calls, left or away, with random earlier calls.
Hellos random_hellos(std::mt19937_64& random) {
  constexpr const char* kLocations[] = {"a", "a", "a", "b", ""};
  const auto location = [&] { return kLocations[random() % 5]; };
  Hellos hellos(2 + random() % 4);
  for (auto& hello : hellos) {
    const uint64_t what = random() % 12;
    if (what == 0) continue;
    hello = what == 1 ? away_from(location()) : at(location());
    if (what == 2) hello->left = Error(ErrorCode::kInterrupted, "stopped");
    for (uint64_t count = random() % 3; count > 0; --count) {
      hello->recent.push_back(fingerprint("save", location()));
      hello->since += random() % 2;
    }
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
    const std::vector<Fate> fates = decide(hellos);
    const auto has = [&](Fate fate) { return std::count(fates.begin(), fates.end(), fate) > 0; };
    const size_t away = count(hellos, [](const Hello& hello) { return hello.may_return; });
    const size_t left = count(hellos, [](const Hello& h) { return h.left && !h.may_return; });
    const size_t here = count(hellos, [](const Hello& hello) { return !hello.may_return; });
    for (const Fate fate : {kGo, Fate::kLeft, Fate::kAway, kMismatch}) {
      EXPECT_TRUE(!has(fate) || fates == all(hellos.size(), fate)) << "round " << round;
    }
    const bool all_here = here == hellos.size(), others_here = here + away == hellos.size();
    EXPECT_TRUE(!has(kGo) || (left == 0 && all_here)) << "round " << round;
    EXPECT_TRUE(!has(Fate::kLeft) || (left > 0 && all_here)) << "round " << round;
    EXPECT_TRUE(!has(Fate::kAway) || (away > 0 && others_here)) << "round " << round;
    if (!has(Fate::kAway) && !has(Fate::kLeft)) continue;
    Hellos back = hellos;  // the ranks that left arrive again, at the call of the others
    for (auto& hello : back) {
      if (hello->left) hello = at("");
    }
    EXPECT_EQ(decide(back), all(back.size(), kGo)) << "round " << round;
    for (size_t rank = 0; rank < hellos.size(); ++rank) {  // if one rank is missing, all wait
      Hellos fewer = hellos;
      fewer[rank].reset();
      for (Fate fate : decide(fewer)) EXPECT_TRUE(fate == kWait || fate == Fate::kBehind);
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
  const Hello sent = at("a", {"b"}, {"c"});
  const Hello came = Hello::decode(sent.encode());
  EXPECT_EQ(came.name(), "save at a");
  EXPECT_EQ(came.recent, sent.recent);
  EXPECT_EQ(came.since, 1);
  EXPECT_EQ(came.agreed, 7);
}

}  // namespace tilestone::comm_internal::rendezvous_test
