// Saves in the background, and processes that are forked or killed meanwhile.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <functional>
#include <memory>
#include <string>

#include "tilestone/base/error.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/engine/commit/claim_internal.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/gate_testing.h"
#include "tilestone/engine/save/async_save.h"
#include "tilestone/engine/save/background_meeting_internal.h"
#include "tilestone/engine/session.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::async_save_processes_test {

// Runs `work` in a forked child. Returns its exit status.
int in_child(const std::function<void()>& work) {
  const pid_t child = ::fork();
  if (child == 0) {
    int status = 1;
    try {
      work();
      status = testing::Test::HasFailure() ? 2 : 0;
    } catch (...) {
    }
    ::_exit(status);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(AsyncSaveProcesses, AForkedChildHasNoPartInTheSaveOfItsParent) {
  Gate gate;
  auto session = std::make_unique<Session>();
  auto saving = std::make_unique<AsyncSave>(
      session->async_save(row_state(solo(), 1), gate.storage(), SaveOptions()));
  EXPECT_EQ(in_child([&] {
              expect_error([&] { saving->result(); }, ErrorCode::kUnsupported, "forked");
              expect_error([&] { saving->abandon(); }, ErrorCode::kUnsupported, "forked");
              const Location own = memory_storage();
              session->save(row_state(solo(), 2), own, SaveOptions());
              session->async_save(row_state(solo(), 3), memory_storage()).result();
              saving.reset();
              session.reset();
            }),
            0);
  gate.open();
  EXPECT_TRUE(saving->result().published);
  expect_rows(gate.storage(), 1, 1);
}

// Killed once it has staged: it has told that it shows its claim, and lacks only its receipt.
TEST(AsyncSaveProcesses, ARankThatIsKilledBeforeItsReceiptIsNamedWithinSeconds) {
  using engine::BackgroundMeeting;
  const TempDirectory folder;
  const auto storage = posix_storage(folder.path());
  const std::string id = "01234567-89ab-4cde-8f01-23456789abcd";
  const auto lock = engine::claim_location(*storage);
  BackgroundMeeting coordinator(storage, id, 0, 3), other(storage, id, 1, 3);
  coordinator.reserve();
  other.reserve();
  int staged[2];
  ASSERT_EQ(::pipe(staged), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    BackgroundMeeting rank(posix_storage(folder.path()), id, 2, 3);
    rank.reserve();
    const char shows = rank.shows_life() ? 'y' : 'n';
    if (::write(staged[1], &shows, 1) == 1) ::pause();
    ::_exit(1);
  }
  char shows = 'n';
  ASSERT_EQ(::read(staged[0], &shows, 1), 1);
  EXPECT_EQ(shows, 'y');
  EXPECT_TRUE(other.shows_life());  // it is slow
  EXPECT_FALSE(coordinator.shows_life());
  coordinator.expect_claims({false, true, true});
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  try {
    coordinator.gather(Bytes(3), Deadline::after(std::chrono::hours(1)));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kRankFailed) << error.what();
    EXPECT_EQ(error.rank(), 2);
    coordinator.end(BackgroundMeeting::Failed{error});
  }
  EXPECT_TRUE(other.wait_for_outcome(*storage, nullptr, Deadline::after(std::chrono::hours(1))));
  for (const int end : staged) ::close(end);
}

}  // namespace tilestone::async_save_processes_test
