#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <initializer_list>

#include "tilestone/comm/rendezvous_internal.h"

namespace tilestone::comm_internal {
namespace {

using testing::ElementsAre;
using Hellos = std::vector<std::optional<Hello>>;

constexpr Fate kWait = Fate::kWait, kGo = Fate::kGo, kBehind = Fate::kBehind,
               kMismatch = Fate::kMismatch;

// A rank that comes to save at `place`, after it saved at `since` (newest first) and, before the
// last call that all made, at `before`.
Hello at(const std::string& place, std::initializer_list<const char*> since = {},
         std::initializer_list<const char*> before = {}) {
  Hello hello;
  hello.work = "save";
  hello.place = place;
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

TEST(Rendezvous, WhoComesToACallThatOthersGaveUpIsBehindThoughSomebodyIsMissing) {
  EXPECT_THAT(decide({at("b", {"a"}), at("a"), std::nullopt}), ElementsAre(kWait, kBehind, kWait));
}

TEST(Rendezvous, WhoSkippedACallWaitsOnceTheOthersAreSeenToFollow) {
  // Rank 1 skipped b; b and c have failed.
  EXPECT_THAT(decide({at("c", {"b"}), at("d", {"c"}), at("c", {"b"})}),
              ElementsAre(kBehind, kWait, kBehind));
}

TEST(Rendezvous, CallsSinceTheLastOneOfAllCountMoreThanOlderOnes) {
  // Both places are used in turn. Rank 1 gave up its call at b, to which rank 0 is just coming.
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

}  // namespace
}  // namespace tilestone::comm_internal
