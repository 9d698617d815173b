// The part of the conformance suite for directories: what is made, children, exchange, rename,
// remove, and what differs in an object store: conditions, leases.
#include <algorithm>
#include <thread>

#include "tilestone/storage/directories.h"
#include "tilestone/storage/lease.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone {
namespace {

using Names = std::vector<std::string>;

// Makes three files: in the directory, in a directory within it, and next to it under a name that
// starts with the directory's name.
void put_tree(Storage& storage, const std::string& directory) {
  storage.directories()->make(directory + "/in/deep");
  put_file(storage, directory + "/f", as_bytes(directory));
  put_file(storage, directory + "/in/g", as_bytes(directory));
  put_file(storage, directory + "0", as_bytes("beside " + directory));
}

std::string text_of(Storage& storage, const std::string& name) {
  return std::string(as_text(read_file(storage, name, 1000)));
}

TEST_P(DirectoryConformance, AnExchangeSwapsTwoDirectoriesWithAllThatIsInThem) {
  put_tree(storage(), "x");
  storage().directories()->make("sub/y");
  put_file(storage(), "sub/y/h", as_bytes("y"));
  const auto open = storage().open("x/f");
  const Names before = storage().list();
  if (!storage().directories()->can_exchange()) {
    expect_error([&] { storage().directories()->exchange("x", "sub/y"); }, ErrorCode::kUnsupported,
                 "cannot exchange");
    EXPECT_EQ(storage().list(), before);
    return;
  }
  storage().directories()->exchange("x", "sub/y");
  EXPECT_EQ(storage().list(), (Names{"sub/y/f", "sub/y/in/g", "x/h", "x0"}));
  EXPECT_EQ(text_of(storage(), "sub/y/in/g"), "x");
  EXPECT_EQ(text_of(storage(), "x/h"), "y");
  EXPECT_EQ(storage().list_directories("sub/y/in/"), Names{"sub/y/in/deep"});
  std::byte byte;
  const ReadOp op{open.get(), 0, 1, &byte};
  storage().read({&op, 1}, {}, [](size_t, ByteView) {});
  EXPECT_EQ(byte, std::byte{'x'});
  storage().directories()->exchange("sub/y", "x");
  EXPECT_EQ(storage().list(), before);
}

TEST_P(DirectoryConformance, WhatIsNoPairOfDirectoriesIsNotExchanged) {
  put_tree(storage(), "x");
  storage().directories()->make("y");
  const auto exchange = [&](const char* a, const char* b) {
    return [this, a, b] { storage().directories()->exchange(a, b); };
  };
  expect_error(exchange("x", "absent"), ErrorCode::kNotFound, "absent");
  expect_error(exchange("absent", "x"), ErrorCode::kNotFound, "absent");
  expect_error(exchange("x", "x0"), ErrorCode::kIo, "x0");
  expect_error(exchange("x/f", "y"), ErrorCode::kIo, "x/f");
  expect_error(exchange("x", "x"), ErrorCode::kInvalidArgument, "contains the other");
  expect_error(exchange("x", "x/in"), ErrorCode::kInvalidArgument, "contains the other");
  expect_error(exchange("x/in", "x"), ErrorCode::kInvalidArgument, "contains the other");
  expect_error(exchange("x", "../x"), ErrorCode::kUnsafe, "..");
  EXPECT_EQ(storage().list(), (Names{"x/f", "x/in/g", "x0"}));
}

TEST_P(DirectoryConformance, ADirectoryIsRenamedWholeAndReplacesAnEmptyOneOnly) {
  put_tree(storage(), "x");
  storage().directories()->rename("x", "y");
  EXPECT_EQ(storage().list(), (Names{"x0", "y/f", "y/in/g"}));
  EXPECT_FALSE(storage().stat("x"));
  storage().directories()->make("sub/empty");
  storage().directories()->rename("y", "sub/empty");
  const Names moved = {"sub/empty/f", "sub/empty/in/g", "x0"};
  EXPECT_EQ(storage().list(), moved);
  EXPECT_EQ(text_of(storage(), "sub/empty/in/g"), "x");
  EXPECT_EQ(storage().list_directories("sub/empty/in/"), Names{"sub/empty/in/deep"});

  storage().directories()->make("other");
  const auto rename = [&](const char* from, const char* to) {
    return [this, from, to] { storage().directories()->rename(from, to); };
  };
  expect_error(rename("other", "sub"), ErrorCode::kAlreadyExists, "sub");
  expect_error(rename("other", "x0"), ErrorCode::kAlreadyExists, "x0");
  expect_error(rename("absent", "new"), ErrorCode::kNotFound, "absent");
  expect_error(rename("other", "absent/new"), ErrorCode::kNotFound, "absent/new");
  expect_error(rename("x0", "new"), ErrorCode::kIo, "x0");
  expect_error(rename("sub", "sub/in"), ErrorCode::kInvalidArgument, "contains the other");
  EXPECT_EQ(storage().list(), moved);
}

TEST_P(DirectoryConformance, ATreeGoesWithAllThatIsInItAndNothingElse) {
  put_tree(storage(), "x");
  put_tree(storage(), "x/in/deep/er");
  storage().directories()->make("x/empty/in/empty");
  put_tree(storage(), "y");
  storage().remove_tree("x");
  EXPECT_EQ(storage().list(), (Names{"x0", "y/f", "y/in/g", "y0"}));
  EXPECT_EQ(storage().list_directories(), Names{"y"});
  storage().remove_tree("y/in");
  EXPECT_EQ(storage().list(), (Names{"x0", "y/f", "y0"}));
  expect_error([&] { storage().remove_tree("x"); }, ErrorCode::kNotFound, "x");
  expect_error([&] { storage().remove_tree("y/f"); }, ErrorCode::kIo, "y/f");
  expect_error([&] { storage().remove_tree("../x"); }, ErrorCode::kUnsafe, "..");
  expect_error([&] { storage().remove_tree(""); }, ErrorCode::kUnsafe, "empty");
}

TEST_P(DirectoryConformance, OnlyAnEmptyDirectoryIsRemovedByItself) {
  put_tree(storage(), "x");
  expect_error([&] { storage().directories()->remove("x"); }, ErrorCode::kIo, "x");
  expect_error([&] { storage().directories()->remove("x/f"); }, ErrorCode::kIo, "x/f");
  expect_error([&] { storage().directories()->remove("absent"); }, ErrorCode::kNotFound, "absent");
  storage().directories()->remove("x/in/deep");
  EXPECT_EQ(storage().list_directories("x/in/"), Names{});
  EXPECT_EQ(storage().list(), (Names{"x/f", "x/in/g", "x0"}));
}

TEST_P(DirectoryConformance, DirectoriesAreListedInOneLevelByPrefix) {
  for (const char* name : {".a.tilestone-1/deep", ".a.tilestone-2", "a/.b.tilestone-1/x", "a/.b",
                           "a/b/c", "a-", "b"}) {
    storage().directories()->make(name);
  }
  put_file(storage(), ".a.tilestone-3", {});
  const auto listed = [&](const std::string& prefix) { return storage().list_directories(prefix); };
  EXPECT_EQ(listed(""), (Names{".a.tilestone-1", ".a.tilestone-2", "a", "a-", "b"}));
  EXPECT_EQ(listed(".a.tilestone-"), (Names{".a.tilestone-1", ".a.tilestone-2"}));
  EXPECT_EQ(listed("a"), (Names{"a", "a-"}));
  EXPECT_EQ(listed("a/"), (Names{"a/.b", "a/.b.tilestone-1", "a/b"}));
  EXPECT_EQ(listed("a/.b.tilestone-"), Names{"a/.b.tilestone-1"});
  EXPECT_EQ(listed("absent/"), Names{});
  EXPECT_EQ(listed("../"), Names{});
  EXPECT_EQ(listed("/"), Names{});
}

TEST_P(DirectoryConformance, FilesAreListedInOneLevelByPrefix) {
  put_tree(storage(), "a");  // a/f, a/in/g, a0
  put_file(storage(), "a/f2", {});
  storage().directories()->make("empty");
  EXPECT_EQ(storage().list_files(), Names{"a0"});
  EXPECT_EQ(storage().list_files("a"), Names{"a0"});
  EXPECT_EQ(storage().list_files("a/"), (Names{"a/f", "a/f2"}));
  EXPECT_EQ(storage().list_files("a/in/"), Names{"a/in/g"});
  EXPECT_EQ(storage().list_files("absent/"), Names{});
  EXPECT_EQ(storage().list_files("../"), Names{});
  EXPECT_EQ(storage().child("a")->list_files(), (Names{"f", "f2"}));
}

TEST_P(DirectoryConformance, AChildIsADirectoryAsAStorageOfItsOwn) {
  const auto child = storage().child("c/d");
  EXPECT_EQ(child->describe(), storage().describe() + "/c/d");
  EXPECT_FALSE(storage().stat("c"));
  EXPECT_FALSE(child->stat("f"));
  EXPECT_EQ(child->list(), Names{});
  put_tree(*child, "x");
  EXPECT_EQ(child->list(), (Names{"x/f", "x/in/g", "x0"}));
  EXPECT_EQ(child->list("x/i"), Names{"x/in/g"});
  EXPECT_EQ(child->list_directories("x/"), Names{"x/in"});
  EXPECT_EQ(child->open("x/f")->name(), "x/f");
  EXPECT_EQ(storage().list(), (Names{"c/d/x/f", "c/d/x/in/g", "c/d/x0"}));
  EXPECT_EQ(text_of(*child->child("x"), "in/g"), "x");
  child->publish("p", "p.tmp", as_bytes("published"), false, Deadline::never());
  EXPECT_EQ(text_of(storage(), "c/d/p"), "published");
  child->remove_tree("x");
  EXPECT_EQ(storage().list(), (Names{"c/d/p", "c/d/x0"}));
  for (const char* name : {"", "..", "/x", "a/../b"}) {
    expect_error([&] { storage().child(name); }, ErrorCode::kUnsafe, "unsafe file name");
  }
}

TEST_P(DirectoryConformance, AChildsLocksAreItsStorages) {
  const auto child = storage().child("c");
  child->directories()->make("");
  const auto lock = child->claim("lock");
  EXPECT_TRUE(storage().is_claimed("c/lock"));
  EXPECT_EQ(storage().claim("c/lock"), nullptr);
}

TEST_P(DirectoryConformance, AChildIsFoundByItsNameInItsParent) {
  const auto child = storage().child("c/d");
  child->directories()->make("");
  put_file(*child, "f", as_bytes("old"));
  const auto entry = child->parent();
  ASSERT_TRUE(entry.has_value());
  EXPECT_EQ(entry->name, "d");
  const auto sibling = entry->storage->child(".d.new");
  sibling->directories()->make("");
  put_file(*sibling, "f", as_bytes("new"));
  EXPECT_EQ(entry->storage->list_directories(".d."), Names{".d.new"});
  EXPECT_EQ(entry->storage->directories()->can_exchange(), storage().directories()->can_exchange());
  if (!storage().directories()->can_exchange()) return;
  entry->storage->directories()->exchange(entry->name, ".d.new");
  EXPECT_EQ(text_of(*child, "f"), "new");
  EXPECT_EQ(text_of(*sibling, "f"), "old");
  entry->storage->remove_tree(".d.new");
  EXPECT_EQ(storage().list(), Names{"c/d/f"});
  const auto top = storage().child("c")->parent();
  ASSERT_TRUE(top.has_value());
  EXPECT_EQ(top->name, "c");
  EXPECT_EQ(top->storage->describe(), storage().describe());
}

TEST_P(DirectoryConformance, AskingWhatItCanLeavesNothingBehind) {
  put_file(storage(), "f", {});
  const bool can = storage().directories()->can_exchange();
  EXPECT_EQ(storage().directories()->can_exchange(), can);
  EXPECT_EQ(storage().list(), Names{"f"});
  EXPECT_EQ(storage().list_directories(), Names{});
}

TEST_P(DirectoryConformance, RenameReplacesOnlyWhereAskedTo) {
  put_file(storage(), "a", as_bytes("A"));
  put_file(storage(), "b", as_bytes("B"));
  expect_error([&] { storage().rename("a", "b", false); }, ErrorCode::kAlreadyExists, "b");
  EXPECT_EQ(as_text(read_file(storage(), "a", 10)), "A");
  EXPECT_EQ(as_text(read_file(storage(), "b", 10)), "B");
  storage().rename("a", "b", true);
  EXPECT_FALSE(storage().stat("a").has_value());
  EXPECT_EQ(as_text(read_file(storage(), "b", 10)), "A");
  storage().rename("b", "c", false);
  EXPECT_EQ(storage().list(), Names{"c"});
}

TEST_P(DirectoryConformance, AnOpenFileKeepsItsContentThroughRenameAndRemove) {
  put_file(storage(), "a", as_bytes("old"));
  put_file(storage(), "b", as_bytes("new"));
  const auto file = storage().open("a");
  Bytes bytes(3);
  const ReadOp op{file.get(), 0, 3, bytes.data()};
  storage().rename("b", "a", true);
  storage().read({&op, 1}, {}, [](size_t, ByteView) {});
  EXPECT_EQ(as_text(bytes), "old");
  storage().remove("a");
  std::ranges::fill(bytes, std::byte{0});
  storage().read({&op, 1}, {}, [](size_t, ByteView) {});
  EXPECT_EQ(as_text(bytes), "old");
}

TEST_P(DirectoryConformance, TheDirectoriesOfANewNameAreMade) {
  put_file(storage(), "made/for/f", as_bytes("f"));
  EXPECT_NE(storage().claim("made/for2/lock"), nullptr);
  EXPECT_EQ(storage().list(), (Names{"made/for/f", "made/for2/lock"}));
  expect_error([&] { storage().create("made/for/f/g"); }, ErrorCode::kIo, "made/for/f");
  expect_error([&] { storage().create("made/for"); }, ErrorCode::kAlreadyExists, "made/for");
}

TEST_P(DirectoryConformance, DirectoriesAreMadeOnceOrOften) {
  storage().directories()->make("");
  storage().directories()->make("x/y/z");
  storage().directories()->make("x/y");
  storage().directories()->make("x/y/z");
  put_file(storage(), "x/y/z/f", as_bytes("deep"));
  storage().settle("x/y/z");
  storage().settle("");
  EXPECT_FALSE(storage().stat("x/y")->regular);
  expect_error([&] { storage().open("x/y"); }, ErrorCode::kUnsafe, "regular");
  expect_error([&] { storage().create("x/y"); }, ErrorCode::kAlreadyExists, "x/y");
  expect_error([&] { storage().directories()->make("x/y/z/f"); }, ErrorCode::kIo, "x/y/z/f");
}

TEST_P(DirectoryConformance, CreateRefusesANameThatIsTaken) {
  put_file(storage(), "taken", as_bytes("old"));
  expect_error([&] { storage().create("taken"); }, ErrorCode::kAlreadyExists, "taken");
  EXPECT_EQ(as_text(read_file(storage(), "taken", 10)), "old");
}

TEST_P(DirectoryConformance, ALockIsHeldByOneAtATime) {
  auto lock = storage().claim("lock");
  ASSERT_NE(lock, nullptr);
  EXPECT_TRUE(storage().is_claimed("lock"));
  EXPECT_EQ(storage().claim("lock"), nullptr);
  EXPECT_TRUE(storage().is_claimed("lock"));
  EXPECT_NE(storage().claim("other"), nullptr);
  lock.reset();
  EXPECT_FALSE(storage().is_claimed("lock"));
  EXPECT_FALSE(storage().is_claimed("never/made"));
  EXPECT_FALSE(storage().stat("never"));
  EXPECT_NE(storage().claim("lock"), nullptr);
  EXPECT_TRUE(storage().stat("lock").has_value());
}

TEST_P(DirectoryConformance, WhatIsNotThereIsNeitherRenamedNorSettled) {
  expect_error([&] { storage().rename("absent", "b", true); }, ErrorCode::kNotFound, "absent");
  expect_error([&] { storage().rename("absent", "b", false); }, ErrorCode::kNotFound, "absent");
  expect_error([&] { storage().settle("absent"); }, ErrorCode::kNotFound, "absent");
}

TEST_P(DirectoryConformance, NoPutAsksForATag) {
  put_file(storage(), "f", as_bytes("old"));
  EXPECT_FALSE(storage().facts().put_if_tag);
  const auto put = [&] {
    storage().put("f", as_bytes("new"), Condition::has("t"), "f.tmp", Deadline::never());
  };
  expect_error(put, ErrorCode::kUnsupported, "tag");
  EXPECT_EQ(text_of(storage(), "f"), "old");
}

bool put(Storage& storage, const char* text, const Condition& condition) {
  return storage.put("f", as_bytes(text), condition, "f.tmp", Deadline::never());
}

TEST_P(ObjectConformance, APutCanAskForATag) {
  EXPECT_FALSE(put(storage(), "none", Condition::has("\"t\"")));
  EXPECT_TRUE(put(storage(), "one", Condition::absent()));
  EXPECT_FALSE(put(storage(), "two", Condition::absent()));
  const std::string one = storage().stat("f")->tag;
  EXPECT_TRUE(put(storage(), "three", Condition::has(one)));
  EXPECT_FALSE(put(storage(), "four", Condition::has(one)));
  EXPECT_EQ(text_of(storage(), "f"), "three");
  EXPECT_NE(storage().stat("f")->tag, one);
  EXPECT_TRUE(storage().facts().put_if_absent);
  EXPECT_TRUE(storage().facts().put_if_tag);
}

TEST_P(ObjectConformance, AFileIsRemovedIfItHasItsTag) {
  put_file(storage(), "f", as_bytes("one"));
  const std::string one = storage().stat("f")->tag;
  EXPECT_TRUE(put(storage(), "two", Condition::has(one)));
  EXPECT_FALSE(storage().remove_if("f", one, Deadline::never()));
  EXPECT_EQ(text_of(storage(), "f"), "two");
  const std::string two = storage().stat("f")->tag;
  EXPECT_TRUE(storage().remove_if("f", two, Deadline::never()));
  EXPECT_TRUE(storage().remove_if("f", two, Deadline::never()));
  EXPECT_EQ(storage().list(), Names{});
}

TEST_P(ObjectConformance, AFileIsThereWhenItIsComplete) {
  put_file(storage(), "taken", as_bytes("old"));
  const auto open = storage().open("taken");
  const auto file = storage().create("f");
  const auto second = storage().create("taken");
  file->append(as_bytes("abc"));
  EXPECT_EQ(storage().list(), Names{"taken"});
  file->close();
  EXPECT_EQ(text_of(storage(), "f"), "abc");
  expect_error([&] { second->sync(Deadline::never()); }, ErrorCode::kAlreadyExists, "taken");
  EXPECT_EQ(text_of(storage(), "taken"), "old");
}

TEST_P(ObjectConformance, APutSaysTheTagThatALookFindsAndItsOwnFileIsRemovedUnderIt) {
  const auto put = [&](const char* text, const Condition& condition) {
    return storage().put_for_tag("f", as_bytes(text), condition, "s", Deadline::never());
  };
  const auto first = put("one", Condition::absent());
  ASSERT_TRUE(first);
  const std::string tag = storage().stat("f")->tag;
  EXPECT_TRUE(first->empty() || *first == tag);
  EXPECT_FALSE(put("other", Condition::absent()));
  const auto second = put("two", Condition::has(tag));
  ASSERT_TRUE(second);
  EXPECT_FALSE(put("three", Condition::has(tag)));
  const std::string now = storage().stat("f")->tag;
  EXPECT_TRUE(second->empty() || *second == now);
  EXPECT_TRUE(storage().remove_if("f", now, Deadline::never(), true));
  EXPECT_FALSE(storage().stat("f"));
  EXPECT_TRUE(storage().remove_if("f", now, Deadline::never(), true));
}

TEST_P(ObjectConformance, AListOfOneInstantIsWholeOrSaysNothing) {
  for (const char* name : {"a", "a/f", "b/in/g"}) put_file(storage(), name, {});
  const Listing all = storage().listing("", Depth::kAtOnce);
  EXPECT_EQ(all.files, all.is_whole ? (Names{"a", "a/f", "b/in/g"}) : Names{});
}

TEST_P(ObjectConformance, DirectoriesAreWhatNamesHaveInCommon) {
  for (const char* name : {"a", "a/f", "a/in/g", "a-/h", "a0"}) put_file(storage(), name, {});
  const Listing top = storage().listing("", Depth::kLevel);
  EXPECT_EQ(top.files, (Names{"a", "a0"}));
  EXPECT_EQ(top.directories, (Names{"a", "a-"}));
  EXPECT_EQ(storage().list_files("a/"), Names{"a/f"});
  EXPECT_EQ(storage().list_directories("a/"), Names{"a/in"});
  EXPECT_EQ(storage().list("a"), (Names{"a", "a-/h", "a/f", "a/in/g", "a0"}));
  EXPECT_FALSE(storage().stat("a/in"));
  EXPECT_EQ(storage().child("a")->list(), (Names{"f", "in/g"}));
  EXPECT_FALSE(storage().parent());
  EXPECT_EQ(storage().held().get(), &storage());
}

TEST_P(ObjectConformance, ATreeGoesAndNothingBesideIt) {
  for (const char* name : {"a", "a/f", "a/in/g", "a-/h", "a0"}) put_file(storage(), name, {});
  storage().remove_tree("a");
  EXPECT_EQ(storage().list(), (Names{"a", "a-/h", "a0"}));
  EXPECT_NO_THROW(storage().remove_tree("a"));
}

// Leases of 0.1 s, for the length of a test.
class ShortLeases {
 public:
  ShortLeases() { set_lease_period(std::chrono::milliseconds(100)); }
  ~ShortLeases() { set_lease_period(before_); }

 private:
  const std::chrono::duration<double> before_ = lease_period();
};

void sleep_periods(int count) { std::this_thread::sleep_for(count * lease_period()); }

TEST_P(ObjectConformance, ANameIsClaimedByOneUntilItIsReleased) {
  const ShortLeases leases;
  EXPECT_TRUE(storage().facts().claims_are_leases());
  EXPECT_FALSE(storage().is_claimed("a/lock"));
  auto lock = storage().claim("a/lock");
  ASSERT_NE(lock, nullptr);
  EXPECT_TRUE(storage().is_claimed("a/lock"));
  EXPECT_EQ(storage().claim("a/lock"), nullptr);
  EXPECT_NE(storage().claim("a/other"), nullptr);
  sleep_periods(6);
  EXPECT_FALSE(lock->held_until(Deadline::never()).expired());
  EXPECT_EQ(storage().claim("a/lock", Deadline::after(std::chrono::seconds(0))), nullptr);
  EXPECT_EQ(storage().list(), Names{"a/lock"});
  lock.reset();
  EXPECT_FALSE(storage().is_claimed("a/lock"));
  EXPECT_EQ(storage().list(), Names{});
  EXPECT_NE(storage().claim("a/lock"), nullptr);
}

TEST_P(ObjectConformance, AClaimOfADeadProcessLapses) {
  const ShortLeases leases;
  put_file(storage(), "lock", as_bytes("process 1 on another host"));
  EXPECT_TRUE(storage().is_claimed("lock"));
  const auto lock = storage().claim("lock");
  ASSERT_NE(lock, nullptr);
  EXPECT_FALSE(lock->held_until(Deadline::never()).expired());
}

TEST_P(ObjectConformance, TheFileOfALockThatWasCopiedClaimsNothing) {
  put_file(storage(), "lock", {});
  EXPECT_FALSE(storage().is_claimed("lock"));
  EXPECT_NE(storage().claim("lock", Deadline::after(std::chrono::seconds(0))), nullptr);
}

TEST_P(ObjectConformance, WhoHasLostAClaimKnowsItAndLeavesThatOfTheOther) {
  const ShortLeases leases;
  auto lock = storage().claim("lock");
  storage().put("lock", as_bytes("other"), Condition::always(), "s", Deadline::never());
  sleep_periods(4);
  EXPECT_TRUE(lock->held_until(Deadline::never()).expired());
  lock.reset();
  EXPECT_EQ(text_of(storage(), "lock"), "other");
}

}  // namespace
}  // namespace tilestone
