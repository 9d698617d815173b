// Tests directories on a real file system: links in paths, systems that can't exchange, held roots.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <stop_token>
#include <thread>

#include "tilestone/base/error_testing.h"
#include "tilestone/storage/directories.h"
#include "tilestone/storage/posix_internal.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/posix_testing.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::posix_directories_test {

namespace fs = std::filesystem;
using Names = std::vector<std::string>;

// The real system, but it counts calls and fails where a test requests it.
class ExchangeSystem : public System {
 public:
  std::atomic<int> exchange_error = 0, sync_error = 0;
  std::atomic<int> exchanges = 0, syncs = 0, opens = 0;
  bool plain_rename = false;  // treats an exchange as a plain rename

  int rename_exchange(int a_directory, const char* a, int b_directory, const char* b) override {
    ++exchanges;
    if (exchange_error != 0) return refuse(exchange_error);
    if (plain_rename) return ::renameat(a_directory, a, b_directory, b);
    return System::rename_exchange(a_directory, a, b_directory, b);
  }
  int fsync(int fd) override {
    ++syncs;
    return sync_error != 0 ? refuse(sync_error) : System::fsync(fd);
  }
  int open_beneath(int directory, const char* name, int flags, unsigned mode) override {
    ++opens;
    return System::open_beneath(directory, name, flags, mode);
  }

 private:
  static int refuse(int error) {
    errno = error;
    return -1;
  }
};

class PosixDirectories : public testing::Test {
 protected:
  PosixDirectories() {
    storage_->directories()->make("x");
    storage_->directories()->make("y");
    put_file(*storage_, "x/f", as_bytes("x"));
    put_file(*storage_, "y/f", as_bytes("y"));
    put_file(*posix_storage(outside_.path()), "secret", as_bytes("outside"));
  }
  const std::string& root() const { return directory_.path(); }
  Storage& storage() { return *storage_; }
  std::string text(const std::string& name) {
    return std::string(as_text(read_file(storage(), name, 100)));
  }

  TempDirectory directory_, outside_;
  std::shared_ptr<ExchangeSystem> system_ = std::make_shared<ExchangeSystem>();
  std::shared_ptr<Storage> storage_ = posix_storage(directory_.path(), {}, system_);
};

TEST_F(PosixDirectories, ARootThatIsAFileIsAnErrorOfListing) {
  const std::string file = root() + "/x/f";
  for (const std::string& path : {file, file + "/below"}) {
    const auto wrong = posix_storage(path);
    for (const auto& call : std::vector<std::function<void()>>{
             [&] { wrong->list(); }, [&] { wrong->list_directories(); }}) {
      const Error error = error_of(call);
      EXPECT_EQ(error.code(), ErrorCode::kIo) << error.what();
      EXPECT_EQ(error.sys_errno(), ENOTDIR) << error.what();
      EXPECT_EQ(error.file(), path);
    }
  }
  EXPECT_EQ(posix_storage(root() + "/absent")->list(), Names{});
}

TEST_F(PosixDirectories, ALinkThatPointsNowhereIsNamedByListingAndMaking) {
  const std::string link = root() + "/link";
  fs::create_directory_symlink(root() + "/absent", link);
  for (const std::string& path : {link, link + "/below/it"}) {
    const auto wrong = posix_storage(path);
    for (const auto& call : std::vector<std::function<void()>>{
             [&] { wrong->list(); }, [&] { wrong->directories()->make(""); },
             [&] { wrong->directories()->make("sub"); }}) {
      const Error error = error_of(call);
      EXPECT_EQ(error.code(), ErrorCode::kNotFound) << error.what();
      EXPECT_EQ(error.file(), link);
      EXPECT_NE(error.message().find("symbolic link"), std::string::npos) << error.what();
    }
  }
  fs::create_directory(root() + "/absent");
  posix_storage(link + "/below/it")->directories()->make("");
  EXPECT_TRUE(fs::is_directory(root() + "/absent/below/it"));
}

TEST_F(PosixDirectories, AnOuterOneThatIsRemovedMeanwhileIsMadeAgain) {
  constexpr int kRounds = 2000;  // some of them meet the removal
  // In each round, far fewer than make_directory() has tries: a slow maker may lose every time.
  constexpr int kRemovals = 20;
  std::atomic<int> removals = 0;
  const std::jthread remover([&](const std::stop_token& done) {
    const auto other = posix_storage(root());
    while (!done.stop_requested()) {
      try {
        if (removals > 0) {
          other->directories()->remove("outer");
          --removals;
        }
      } catch (const Error&) {
        // It does not exist, or is not empty.
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  });
  for (int i = 0; i < kRounds; ++i) {
    removals = kRemovals;
    EXPECT_NO_THROW(storage_->directories()->make("outer/inner"));
    storage_->directories()->remove("outer/inner");
  }
}

TEST_F(PosixDirectories, WhetherItCanExchangeIsTriedOnce) {
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(storage().directories()->can_exchange());
  EXPECT_EQ(system_->exchanges, 1);
  storage().directories()->exchange("x", "y");
  EXPECT_EQ(system_->exchanges, 2);
  EXPECT_EQ(text("x/f"), "y");
}

TEST_F(PosixDirectories, WhatAKilledTrialLeftGoesOnceItIsOld) {
  fs::create_directories(root() + "/.tilestone-probe-old/b/in");
  fs::create_directories(root() + "/.tilestone-probe-new/a");
  const auto hours_ago = fs::file_time_type::clock::now() - std::chrono::hours(2);
  fs::last_write_time(root() + "/.tilestone-probe-old", hours_ago);
  EXPECT_TRUE(storage().directories()->can_exchange());
  EXPECT_EQ(storage().list_directories("."), Names{".tilestone-probe-new"});
}

TEST_F(PosixDirectories, AnExchangeIsDurableWhenItReturns) {
  storage().directories()->make("sub/z");
  storage().directories()->can_exchange();
  system_->syncs = 0;
  storage().directories()->exchange("x", "y");
  EXPECT_EQ(system_->syncs, 1);
  storage().directories()->exchange("x", "sub/z");
  EXPECT_EQ(system_->syncs, 3);  // of both directories
  storage().directories()->rename("x", "sub/w");
  EXPECT_EQ(system_->syncs, 5);
  system_->sync_error = EIO;
  expect_error([&] { storage().directories()->exchange("y", "sub/w"); }, ErrorCode::kIo, "sync");
}

TEST_F(PosixDirectories, ASystemThatCannotExchangeSaysSoAndChangesNothing) {
  for (const int error : {EINVAL, ENOSYS, EOPNOTSUPP, EXDEV}) {
    SCOPED_TRACE(error);
    const auto storage = posix_storage(root(), {}, system_);
    system_->exchange_error = error;
    EXPECT_FALSE(storage->directories()->can_exchange());
    try {
      storage->directories()->exchange("x", "y");
      ADD_FAILURE();
    } catch (const Error& caught) {
      EXPECT_EQ(caught.code(), ErrorCode::kUnsupported);
      EXPECT_EQ(caught.file(), root() + "/x");
      EXPECT_FALSE(caught.hint().empty());
    }
    EXPECT_EQ(text("x/f"), "x");
    EXPECT_EQ(storage->list_directories(), (Names{"x", "y"}));
  }
}

TEST_F(PosixDirectories, ASystemThatTakesAnExchangeForARenameIsFoundOut) {
  system_->plain_rename = true;
  EXPECT_FALSE(storage().directories()->can_exchange());
  storage().directories()->make("empty");  // a rename would replace it
  expect_error([&] { storage().directories()->exchange("x", "empty"); }, ErrorCode::kUnsupported);
  EXPECT_EQ(storage().list_directories(), (Names{"empty", "x", "y"}));
}

TEST_F(PosixDirectories, AMountPointIsNotExchangedThoughOthersAre) {
  ASSERT_TRUE(storage().directories()->can_exchange());
  system_->exchange_error = EBUSY;
  expect_error([&] { storage().directories()->exchange("x", "y"); }, ErrorCode::kUnsupported, "x");
  system_->exchange_error = 0;
  storage().directories()->exchange("x", "y");
}

TEST_F(PosixDirectories, ATrialThatFailsForAnotherReasonIsMadeAgain) {
  system_->exchange_error = EIO;
  EXPECT_FALSE(storage().directories()->can_exchange());
  system_->exchange_error = 0;
  EXPECT_TRUE(storage().directories()->can_exchange());
  EXPECT_FALSE(posix_storage(root() + "/absent")->directories()->can_exchange());
}

TEST_F(PosixDirectories, LinksAreNotExchangedRenamedOrListed) {
  fs::create_directory_symlink("x", root() + "/inside");
  fs::create_directory_symlink(outside_.path(), root() + "/out");
  for (const char* link : {"inside", "out"}) {
    SCOPED_TRACE(link);
    const auto refused = [](const std::function<void()>& call) {
      expect_error(call, ErrorCode::kUnsafe, "symbolic link");
    };
    refused([&] { storage().directories()->exchange(link, "y"); });
    refused([&] { storage().directories()->exchange("y", link); });
    refused([&] { storage().directories()->rename(link, "z"); });
    expect_error([&] { storage().directories()->rename("x", link); }, ErrorCode::kAlreadyExists,
                 link);
    expect_error([&] { storage().directories()->remove(link); }, ErrorCode::kIo, link);
    EXPECT_EQ(storage().list_directories(std::string(link) + "/"), Names{});
    EXPECT_EQ(storage().list(std::string(link) + "/"), Names{});
  }
  EXPECT_EQ(storage().list_directories(), (Names{"x", "y"}));
  EXPECT_EQ(text("inside/f"), "x");
}

TEST_F(PosixDirectories, RemovingATreeRemovesLinksAndNotWhatTheyLeadTo) {
  fs::create_directory_symlink(outside_.path(), root() + "/x/out");
  fs::create_directory_symlink("../y", root() + "/x/inside");
  fs::create_symlink("nowhere", root() + "/x/dangling");
  ASSERT_EQ(::mkfifo((root() + "/x/fifo").c_str(), 0666), 0);
  storage().remove_tree("x");
  EXPECT_FALSE(fs::exists(root() + "/x"));
  EXPECT_EQ(text("y/f"), "y");
  EXPECT_TRUE(fs::exists(outside_.path() + "/secret"));
  fs::create_directory_symlink(outside_.path(), root() + "/out");
  expect_error([&] { storage().remove_tree("out"); }, ErrorCode::kUnsafe, "symbolic link");
  fs::create_directory_symlink("y", root() + "/inside");
  expect_error([&] { storage().remove_tree("inside"); }, ErrorCode::kIo, "inside");
  EXPECT_EQ(text("y/f"), "y");
  EXPECT_TRUE(fs::exists(outside_.path() + "/secret"));
}

TEST_F(PosixDirectories, SiblingsAreFoundWithoutLookingAtTheOthers) {
  const auto find = [&] {
    system_->opens = 0;
    EXPECT_EQ(storage().list_directories(".x.tilestone-"), Names{".x.tilestone-1"});
    return system_->opens.load();
  };
  storage().directories()->make(".x.tilestone-1");
  const int alone = find();
  for (int i = 0; i < 50; ++i)
    storage().directories()->make("other-" + std::to_string(i) + "/deep");
  EXPECT_EQ(find(), alone);
}

TEST_F(PosixDirectories, AChildIsNotReachedThroughALinkThatLeadsOut) {
  fs::create_directory_symlink(outside_.path(), root() + "/out");
  const auto child = storage().child("out");
  const auto refused = [](const std::function<void()>& call) {
    expect_error(call, ErrorCode::kUnsafe, "symbolic link");
  };
  refused([&] { child->stat("secret"); });
  refused([&] { child->list(); });
  refused([&] { child->create("new"); });
  refused([&] { child->directories()->make(""); });
  refused([&] { child->remove("secret"); });
  EXPECT_TRUE(fs::exists(outside_.path() + "/secret"));
}

TEST_F(PosixDirectories, TheParentOfAPathIsThatOfTheDirectoryItLeadsTo) {
  fs::create_directory_symlink(root() + "/x", outside_.path() + "/link");
  const std::string real = fs::canonical(root()).string();
  for (const std::string& path :
       {root() + "/x", root() + "/x/", outside_.path() + "/link", root() + "/y/../x"}) {
    SCOPED_TRACE(path);
    const auto place = posix_storage(path)->parent();
    ASSERT_TRUE(place.has_value());
    EXPECT_EQ(place->name, "x");
    EXPECT_EQ(place->storage->describe(), real);
    EXPECT_TRUE(place->storage->stat("x/f"));
  }
  // The directory that a link leads to has its siblings elsewhere.
  fs::create_directories(root() + "/y/real");
  fs::create_directory_symlink("y/real", root() + "/inside");
  const auto place = storage().child("inside")->parent();
  ASSERT_TRUE(place.has_value());
  EXPECT_EQ(place->name, "real");
  EXPECT_EQ(place->storage->describe(), real + "/y");
}

TEST_F(PosixDirectories, TheParentOfWhatIsNotThereYetIsKnown) {
  const std::string real = fs::canonical(root()).string();
  const auto place = posix_storage(root() + "/new/deep")->parent();
  ASSERT_TRUE(place.has_value());
  EXPECT_EQ(place->name, "deep");
  EXPECT_EQ(place->storage->describe(), real + "/new");
  EXPECT_EQ(posix_storage("/not-there")->parent()->storage->describe(), "/");
  EXPECT_EQ(posix_storage("not-there")->parent()->storage->describe(), fs::current_path().string());
  EXPECT_FALSE(posix_storage("/")->parent().has_value());
  fs::create_directory_symlink("nowhere", root() + "/dangling");
  EXPECT_FALSE(posix_storage(root() + "/dangling")->parent().has_value());
}

TEST_F(PosixDirectories, WhoHoldsADirectoryStaysWithItThroughExchangeAndRemoval) {
  const auto x = storage().child("x");
  const auto held = x->held();
  const auto deeper = held->child("in");
  deeper->directories()->make("");
  put_file(*deeper, "g", as_bytes("in x"));
  EXPECT_TRUE(held->stands());
  {
    const FilesLeft none(0);
    expect_error([&] { held->stands(); }, ErrorCode::kIo, "Too many open files");
  }
  storage().directories()->exchange("x", "y");
  EXPECT_FALSE(held->stands());
  EXPECT_TRUE(x->stands() && x->held()->stands());
  EXPECT_EQ(as_text(read_file(*x, "f", 10)), "y");
  EXPECT_EQ(as_text(read_file(*held, "f", 10)), "x");
  EXPECT_EQ(as_text(read_file(*deeper, "g", 10)), "in x");
  EXPECT_EQ(held->list(), (Names{"f", "in/g"}));
  EXPECT_FALSE(held->parent().has_value());
  EXPECT_EQ(deeper->parent()->name, "in");
  storage().remove_tree("y");
  storage().remove_tree("x");
  EXPECT_FALSE(held->stands());
  EXPECT_EQ(held->list(), Names{});
  EXPECT_FALSE(held->stat("f"));
  expect_error([&] { held->open("f"); }, ErrorCode::kNotFound, "f");
  expect_error([&] { storage().child("absent")->held(); }, ErrorCode::kNotFound, "absent");
}

}  // namespace tilestone::posix_directories_test
