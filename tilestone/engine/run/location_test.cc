#include "tilestone/engine/run/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <pwd.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "tilestone/base/error.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::location_test {

namespace fs = std::filesystem;
using testing::HasSubstr;

// Changes the working directory while it lives.
class Within {
 public:
  explicit Within(const fs::path& folder) : before_(fs::current_path()) {
    fs::current_path(folder);
  }
  ~Within() { fs::current_path(before_); }

 private:
  fs::path before_;
};

// Sets $HOME while it lives; null unsets it.
class Home {
 public:
  explicit Home(const char* home) {
    if (const char* const set = std::getenv("HOME")) before_ = set;
    home == nullptr ? ::unsetenv("HOME") : ::setenv("HOME", home, 1);
  }
  ~Home() { before_.empty() ? ::unsetenv("HOME") : ::setenv("HOME", before_.c_str(), 1); }

 private:
  std::string before_;
};

StateDict one_value() {
  StateDict state;
  state["step"] = 7;
  return state;
}

TEST(Location, AUrlIsRefusedByItsSchemeAndMakesNoFolder) {
  const TempDirectory folder;
  const Within within(folder.path());
  for (const char* url : {"s3:/bucket/x", "gs://b", "hdfs://host:9000/a", "az:/", "file:///tmp/x",
                          "simplecache::s3://b/x", "HTTPS://host/x"}) {
    SCOPED_TRACE(url);
    const std::string scheme = std::string(url).substr(0, std::string(url).find('/') - 1);
    const std::string what = "a URL of the scheme \"" + scheme + "\"";
    expect_error([&] { save(one_value(), url); }, ErrorCode::kUnsupported, what);
    expect_error([&] { load(one_value(), url); }, ErrorCode::kUnsupported, what);
    expect_error([&] { Checkpoint::open(url); }, ErrorCode::kUnsupported, what);
    expect_error([&] { find_leftovers(Location(url)); }, ErrorCode::kUnsupported, what);
  }
  EXPECT_TRUE(fs::is_empty(folder.path()));
  fs::create_directory("s3:");
  save(one_value(), "./s3:/x");
  EXPECT_TRUE(fs::exists("s3:/x/.metadata"));
  save(one_value(), "a:b/c:");  // no scheme
  EXPECT_TRUE(fs::exists("a:b/c:/.metadata"));
}

TEST(Location, ALeadingTildeIsTheHomeDirectory) {
  const TempDirectory folder;
  const Within within(folder.path());
  const std::string home = folder.path() + "/home";
  const Home set(home.c_str());
  save(one_value(), "~/x");
  save(one_value(), "~");
  EXPECT_TRUE(fs::exists(home + "/x/.metadata"));
  EXPECT_TRUE(fs::exists(home + "/.metadata"));
  EXPECT_FALSE(fs::exists("~"));
  EXPECT_EQ(Location("./~/x").identity(), folder.path() + "/~/x");
  EXPECT_EQ(Location("a~/x").identity(), folder.path() + "/a~/x");
}

TEST(Location, ATildeWithAUsersNameIsThatUsersHomeDirectory) {
  const passwd* const me = ::getpwuid(::geteuid());
  ASSERT_NE(me, nullptr);
  const std::string home = fs::path(me->pw_dir).lexically_normal().string();
  EXPECT_EQ(Location(std::string("~") + me->pw_name + "/x").identity(), home + "/x");
  const Home none(nullptr);
  EXPECT_EQ(Location("~/x").identity(), home + "/x");
  expect_error([] { save(one_value(), "~no-such-user/x"); }, ErrorCode::kInvalidArgument,
               "\"~no-such-user\"");
}

TEST(Location, WhatIsNoPathIsRefusedWhenItIsUsed) {
  const Location empty(""), nul(std::string("/tmp/a\0b", 8)), nothing(std::shared_ptr<Storage>{});
  expect_error([&] { save(one_value(), empty); }, ErrorCode::kInvalidArgument, "empty");
  expect_error([&] { save(one_value(), nul); }, ErrorCode::kInvalidArgument, "NUL");
  expect_error([&] { save(one_value(), nothing); }, ErrorCode::kInvalidArgument,
               "without a storage");
}

TEST(Location, OneDirectoryHasOneIdentityHoweverItIsWritten) {
  const TempDirectory folder;
  const Within within(folder.path());
  const std::string whole = folder.path() + "/a/b";
  for (const std::string& path : {std::string("a/b"), std::string("./a//b/"),
                                  std::string("a/c/../b"), whole, whole + "/", whole + "///."}) {
    EXPECT_EQ(Location(path).identity(), whole) << path;
  }
  EXPECT_EQ(Location("/").identity(), "/");
}

TEST(Location, ARelativePathStaysWhatItWasWhenItWasFirstUsed) {
  const TempDirectory folder;
  const TempDirectory elsewhere;
  Location location("x");
  {
    const Within within(folder.path());
    save(one_value(), location);
  }
  const Within within(elsewhere.path());
  EXPECT_EQ(Checkpoint::open(location).read_object("step"), Value(7));
}

}  // namespace tilestone::location_test
