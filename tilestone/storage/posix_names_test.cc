// Names that a file system may turn into something else: links, FIFOs, directories.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cerrno>
#include <filesystem>

#include "tilestone/storage/posix_internal.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone {
namespace {

namespace fs = std::filesystem;
using Names = std::vector<std::string>;

// A system that may be too old for openat2.
class OldSystem : public System {
 public:
  explicit OldSystem(bool openat2_missing) : openat2_missing_(openat2_missing) {}
  int open_beneath(int directory, const char* name, int flags, unsigned mode) override {
    if (!openat2_missing_) return System::open_beneath(directory, name, flags, mode);
    errno = ENOSYS;
    return -1;
  }

 private:
  bool openat2_missing_;
};

// The parameter: whether openat2 is missing.
class PosixNames : public testing::TestWithParam<bool> {
 protected:
  PosixNames()
      : storage_(posix_storage(directory_.path(), {}, std::make_shared<OldSystem>(GetParam()))) {
    fs::create_directory(root() + "/sub");
    put_file(*storage_, "sub/file", as_bytes("inside"));
    put_file(*posix_storage(outside_.path()), "secret", as_bytes("outside"));
  }
  std::string root() const { return directory_.path(); }
  Storage& storage() { return *storage_; }

  TempDirectory directory_;
  TempDirectory outside_;
  std::shared_ptr<Storage> storage_;
};

TEST_P(PosixNames, LinksInsideAreFollowed) {
  fs::create_symlink("sub/file", root() + "/link");
  fs::create_symlink("sub", root() + "/dirlink");
  fs::create_symlink("../sub/../link", root() + "/sub/chain");
  for (const char* name : {"link", "dirlink/file", "sub/chain", "dirlink/chain"}) {
    EXPECT_EQ(as_text(read_file(storage(), name, 100)), "inside") << name;
    EXPECT_EQ(storage().stat(name)->size, 6u) << name;
  }
  put_file(storage(), "dirlink/new", as_bytes("x"));
  storage().rename("dirlink/new", "sub/renamed", false);
  EXPECT_TRUE(fs::exists(root() + "/sub/renamed"));
}

TEST_P(PosixNames, LinksOutsideAreRefused) {
  fs::create_symlink(outside_.path() + "/secret", root() + "/absolute");
  fs::create_symlink("../" + fs::path(outside_.path()).filename().string() + "/secret",
                     root() + "/relative");
  fs::create_symlink(outside_.path(), root() + "/dir");
  fs::create_symlink("loop", root() + "/loop");
  const auto refused = [](const std::function<void()>& call) {
    expect_error(call, ErrorCode::kUnsafe, "symbolic link");
  };
  for (const char* name : {"absolute", "relative", "dir/secret", "loop"}) {
    SCOPED_TRACE(name);
    refused([&] { storage().open(name); });
    refused([&] { storage().stat(name); });
    refused([&] { storage().try_lock(name); });
  }
  refused([&] { storage().create("dir/new"); });
  refused([&] { storage().remove("dir/secret"); });
  refused([&] { storage().rename("dir/secret", "mine", true); });
  refused([&] { storage().rename("sub/file", "dir/file", true); });
  refused([&] { storage().make_directory("dir/new"); });
  refused([&] { storage().sync_directory("dir"); });
  expect_error([&] { storage().create("absolute"); }, ErrorCode::kAlreadyExists);
  const auto other = posix_storage(outside_.path());
  EXPECT_EQ(other->list(), Names{"secret"});
  EXPECT_EQ(as_text(read_file(*other, "secret", 100)), "outside");
}

TEST_P(PosixNames, DanglingLinksAreNotThere) {
  fs::create_symlink("sub/absent", root() + "/dangling");
  EXPECT_FALSE(storage().stat("dangling").has_value());
  expect_error([&] { storage().open("dangling"); }, ErrorCode::kNotFound, "dangling");
  expect_error([&] { storage().create("dangling"); }, ErrorCode::kAlreadyExists, "dangling");
}

TEST_P(PosixNames, FifosAndDirectoriesAreRefusedWithoutWaiting) {
  ASSERT_EQ(::mkfifo((root() + "/fifo").c_str(), 0666), 0);
  EXPECT_FALSE(storage().stat("fifo")->regular);
  for (const char* name : {"fifo", "sub"}) {
    expect_error([&] { storage().open(name); }, ErrorCode::kUnsafe, "not a regular file");
  }
  expect_error([&] { storage().try_lock("fifo"); }, ErrorCode::kUnsafe, "not a regular file");
  expect_error([&] { storage().create("fifo"); }, ErrorCode::kAlreadyExists, "fifo");
}

TEST_P(PosixNames, AFileInPlaceOfADirectoryIsNoDirectory) {
  EXPECT_FALSE(storage().stat("sub/file/x").has_value());
  expect_error([&] { storage().open("sub/file/x"); }, ErrorCode::kNotFound, "sub/file/x");
  expect_error([&] { storage().create("sub/file/x"); }, ErrorCode::kIo, "sub/file/x");
}

INSTANTIATE_TEST_SUITE_P(WithAndWithoutOpenat2, PosixNames, testing::Bool());

}  // namespace
}  // namespace tilestone
