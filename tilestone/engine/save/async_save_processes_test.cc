// Saves in the background, and processes that are forked meanwhile.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <memory>

#include "tilestone/comm/communicator.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/gate_testing.h"
#include "tilestone/engine/save/async_save.h"
#include "tilestone/engine/session.h"
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

}  // namespace tilestone::async_save_processes_test
