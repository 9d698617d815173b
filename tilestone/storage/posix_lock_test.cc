#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>

#include "tilestone/base/host.h"
#include "tilestone/storage/posix_internal.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/posix_testing.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::posix_lock_test {

// A process that runs until the object is destroyed.
class Child {
 public:
  template <typename Body>
  explicit Child(const Body& body) : pid_(::fork()) {
    if (pid_ != 0) return;
    body();
    for (;;) ::pause();
  }
  ~Child() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

 private:
  pid_t pid_;
};

TEST(PosixLock, GoesWithItsObjectThoughAForkedChildLives) {
  const TempDirectory folder;
  const auto storage = posix_storage(folder.path());
  auto lock = storage->claim("lock");
  const Child child([] {});
  EXPECT_TRUE(storage->is_claimed("lock"));
  lock.reset();
  EXPECT_FALSE(storage->is_claimed("lock"));
  EXPECT_NE(storage->claim("lock"), nullptr);
}

// "nullptr" would say that another holds it.
TEST(PosixLock, AProcessThatCanOpenNoMoreFilesGetsAnErrorThatNamesTheLimit) {
  const TempDirectory folder;
  const auto storage = posix_storage(folder.path());
  storage->claim("lock");
  int failed = 0;
  for (int left = 0; left < 4; ++left) {
    const FilesLeft few(left);
    try {
      EXPECT_NE(storage->claim("lock"), nullptr) << left;
    } catch (const Error& error) {
      ++failed;
      EXPECT_EQ(error.sys_errno(), EMFILE);
      EXPECT_THAT(error.hint(), testing::HasSubstr("at most 128 open files"));
    }
  }
  EXPECT_GE(failed, 2);
}

TEST(PosixLock, TheFileSaysWhoHoldsItAndSinceWhen) {
  const TempDirectory folder;
  const auto storage = posix_storage(folder.path());
  const auto text = [&] { return std::string(as_text(read_file(*storage, "lock", 1000))); };
  auto lock = storage->claim("lock");
  EXPECT_THAT(text(), testing::MatchesRegex("process " + std::to_string(::getpid()) + " on " +
                                            host_name() + " since 20[0-9-]* [0-9:]* UTC"));
  EXPECT_EQ(storage->claim("lock"), nullptr);
  EXPECT_THAT(text(), testing::StartsWith("process "));
  lock.reset();
  EXPECT_EQ(text(), "");
}

TEST(PosixLock, GoesWithItsProcessThoughAForkedChildLives) {
  const TempDirectory folder;
  const auto storage = posix_storage(folder.path());
  std::array<int, 2> forked{};
  ASSERT_EQ(::pipe(forked.data()), 0);
  const pid_t holder = ::fork();
  if (holder == 0) {
    const auto lock = storage->claim("lock");
    if (::fork() == 0) {
      const pid_t self = ::getpid();
      if (::write(forked[1], &self, sizeof self) != sizeof self) ::_exit(1);
      for (;;) ::pause();
    }
    ::_exit(lock == nullptr ? 1 : 0);  // no destructor runs
  }
  pid_t child = 0;
  ASSERT_EQ(::read(forked[0], &child, sizeof child), static_cast<ssize_t>(sizeof child));
  int status = -1;
  ASSERT_EQ(::waitpid(holder, &status, 0), holder);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(::kill(child, 0), 0) << "the child must be alive";
  EXPECT_FALSE(storage->is_claimed("lock"));
  EXPECT_NE(storage->claim("lock"), nullptr);
  ::kill(child, SIGKILL);
}

TEST(PosixLock, AChildThatDropsItsCopyLeavesTheParentsLock) {
  const TempDirectory folder;
  const auto storage = posix_storage(folder.path());
  auto lock = storage->claim("lock");
  const pid_t child = ::fork();
  if (child == 0) {
    lock.reset();
    ::_exit(storage->is_claimed("lock") ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(storage->is_claimed("lock"));
}

class LocklessSystem : public System {
 public:
  explicit LocklessSystem(int error) : error_(error) {}
  int lock(int) override {
    errno = error_;
    return -1;
  }

 private:
  int error_;
};

TEST(PosixLock, WhereNothingCanBeLockedTryingSaysSo) {
  for (const int error : {ENOSYS, ENOLCK, EOPNOTSUPP}) {
    const TempDirectory directory;
    const auto storage =
        posix_storage(directory.path(), {}, std::make_shared<LocklessSystem>(error));
    expect_error([&] { storage->claim("lock"); }, ErrorCode::kUnsupported,
                 directory.path() + "/lock");
    EXPECT_FALSE(storage->is_claimed("lock"));
  }
}

}  // namespace tilestone::posix_lock_test
