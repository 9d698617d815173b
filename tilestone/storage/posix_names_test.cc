// Tests names that are not regular files: links, FIFOs, directories.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cerrno>
#include <filesystem>

#include "tilestone/storage/directories.h"
#include "tilestone/storage/posix_internal.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::posix_names_test {

namespace fs = std::filesystem;
using Names = std::vector<std::string>;

// The real system, optionally without openat2.
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
    refused([&] { storage().claim(name); });
    refused([&] { storage().is_claimed(name); });
  }
  refused([&] { storage().create("dir/new"); });
  refused([&] { storage().remove("dir/secret"); });
  refused([&] { storage().rename("dir/secret", "mine", true); });
  refused([&] { storage().rename("sub/file", "dir/file", true); });
  refused([&] { storage().directories()->make("dir/new"); });
  refused([&] { storage().settle("dir"); });
  expect_error([&] { storage().create("absolute"); }, ErrorCode::kAlreadyExists);
  const auto other = posix_storage(outside_.path());
  EXPECT_EQ(other->list(), Names{"secret"});
  EXPECT_EQ(as_text(read_file(*other, "secret", 100)), "outside");
}

TEST_P(PosixNames, AnAbsoluteLinkToAFileInsideIsRead) {
  fs::create_symlink(root() + "/sub/file", root() + "/absolute");
  fs::create_symlink(root() + "/dir-of-another-name", root() + "/dangling");
  fs::create_symlink(root() + "/sub", root() + "/directory");
  EXPECT_EQ(as_text(read_file(storage(), "absolute", 100)),
            as_text(read_file(storage(), "sub/file", 100)));
  EXPECT_EQ(storage().stat("absolute")->size, storage().stat("sub/file")->size);
  EXPECT_FALSE(storage().stat("dangling"));
  expect_error([&] { storage().stat("directory"); }, ErrorCode::kUnsafe, "symbolic link");
  expect_error([&] { storage().claim("absolute"); }, ErrorCode::kUnsafe, "symbolic link");
  // The name of the root is the beginning of the name of a directory beside it.
  fs::create_directory(root() + "-beside");
  put_file(*posix_storage(root() + "-beside"), "file", as_bytes("outside"));
  fs::create_symlink(root() + "-beside/file", root() + "/beside");
  expect_error([&] { storage().open("beside"); }, ErrorCode::kUnsafe, "symbolic link");
  fs::remove_all(root() + "-beside");
}

// Makes models/blobs/1234, and models/snapshots/rev with links to it.
struct Hub {
  TempDirectory directory;
  std::string models = directory.path() + "/models";
  std::string snapshot = models + "/snapshots/rev";
  Hub() {
    fs::create_directories(snapshot + "/sub");
    put_file(*posix_storage(models), "secret", as_bytes("not a blob"));
    const auto blobs = posix_storage(models + "/blobs");
    blobs->directories()->make("");
    put_file(*blobs, "1234", as_bytes("a blob"));
    fs::create_symlink("../../blobs/1234", snapshot + "/file");
    fs::create_symlink("../../../blobs/1234", snapshot + "/sub/file");
    fs::create_symlink(models + "/blobs/1234", snapshot + "/absolute");
  }
};

TEST_P(PosixNames, FilesOfTheHubsCacheAreReadThroughTheirLinks) {
  const Hub hub;
  fs::create_symlink(hub.snapshot, root() + "/link");  // the root itself may be a link
  for (const std::string& place : {hub.snapshot, root() + "/link", hub.snapshot + "/sub"}) {
    const auto storage = posix_storage(place, {}, std::make_shared<OldSystem>(GetParam()));
    EXPECT_EQ(as_text(read_file(*storage, "file", 100)), "a blob");
    EXPECT_EQ(storage->stat("file")->size, 6u);
  }
  const auto storage = posix_storage(hub.snapshot, {}, std::make_shared<OldSystem>(GetParam()));
  EXPECT_EQ(as_text(read_file(*storage, "sub/file", 100)), "a blob");
  EXPECT_EQ(as_text(read_file(*storage, "absolute", 100)), "a blob");
  // Calls that change names change the links, not their targets.
  storage->rename("file", "renamed", false);
  storage->remove("renamed");
  expect_error([&] { storage->claim("absolute"); }, ErrorCode::kUnsafe, "symbolic link");
  EXPECT_EQ(as_text(read_file(*posix_storage(hub.models), "blobs/1234", 100)), "a blob");
}

TEST_P(PosixNames, OtherLinksOutsideAreReadThroughWhereAskedAlone) {
  const Hub hub;
  fs::create_directory(hub.models + "/blobs/deeper");
  put_file(*posix_storage(hub.models), "blobs/deeper/file", as_bytes("deeper"));
  fs::create_directories(hub.directory.path() + "/other/blobs");
  put_file(*posix_storage(hub.directory.path()), "other/blobs/1", as_bytes("another model's"));
  ASSERT_EQ(::mkfifo((hub.models + "/blobs/fifo").c_str(), 0666), 0);
  const std::pair<const char*, const char*> links[] = {
      {"../../secret", "not a blob"},
      {"../../blobs/deeper/file", "deeper"},
      {"../../../other/blobs/1", "another model's"},
      {"../../blobs/fifo", nullptr},
      {"../../blobs", nullptr},
      {"/dev/null", nullptr},
  };
  PosixOptions asked;
  asked.links = PosixOptions::Links::kAll;
  const auto system = std::make_shared<OldSystem>(GetParam());
  const auto by_default = posix_storage(hub.snapshot, {}, system);
  const auto all = posix_storage(hub.snapshot, asked, system);
  for (const auto& [target, content] : links) {
    SCOPED_TRACE(target);
    fs::remove(hub.snapshot + "/link");
    fs::create_symlink(target, hub.snapshot + "/link");
    expect_error([&] { by_default->open("link"); }, ErrorCode::kUnsafe, "reading.follow_links");
    expect_error([&] { by_default->stat("link"); }, ErrorCode::kUnsafe, "symbolic link");
    if (content != nullptr) {
      EXPECT_EQ(as_text(read_file(*all, "link", 100)), content);
    } else {
      expect_error([&] { all->open("link"); }, ErrorCode::kUnsafe, "symbolic link");
    }
  }
  fs::remove(hub.models + "/blobs/1234");
  EXPECT_FALSE(all->stat("file"));
  expect_error([&] { by_default->open("file"); }, ErrorCode::kNotFound, "file");
}

// Direct reads open a file a second time.
TEST_P(PosixNames, ALargeFileOfTheHubsCacheIsReadDirectly) {
  const Hub hub;
  const Bytes bytes = pattern_bytes(3u << 20);
  put_file(*posix_storage(hub.models), "blobs/large", bytes);
  fs::create_symlink("../../blobs/large", hub.snapshot + "/large");
  const auto storage = posix_storage(hub.snapshot, {}, std::make_shared<OldSystem>(GetParam()));
  EXPECT_TRUE(same_bytes(read_file(*storage, "large", bytes.size()), bytes));
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
  expect_error([&] { storage().claim("fifo"); }, ErrorCode::kUnsafe, "not a regular file");
  expect_error([&] { storage().create("fifo"); }, ErrorCode::kAlreadyExists, "fifo");
}

TEST_P(PosixNames, AFileInPlaceOfADirectoryIsNoDirectory) {
  EXPECT_FALSE(storage().stat("sub/file/x").has_value());
  expect_error([&] { storage().open("sub/file/x"); }, ErrorCode::kNotFound, "sub/file/x");
  expect_error([&] { storage().create("sub/file/x"); }, ErrorCode::kIo, "sub/file/x");
}

INSTANTIATE_TEST_SUITE_P(WithAndWithoutOpenat2, PosixNames, testing::Bool());

}  // namespace tilestone::posix_names_test
