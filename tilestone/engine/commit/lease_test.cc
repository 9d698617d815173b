#include <gtest/gtest.h>

#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <optional>

#include "tilestone/base/call_scope.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/commit/lease_internal.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"

namespace tilestone::engine::lease_test {

// A save may write in one call and report in a later one. The lease spans both.
TEST(Lease, ItsThreadWorksForNoCallAsItMayOutliveTheOneThatMadeIt) {
  std::mutex mutex;
  std::condition_variable logged;
  std::optional<void*> call_of_message;
  set_log_sink([&](LogLevel, std::string_view) {
    const std::lock_guard lock(mutex);
    call_of_message = CallScope::current();
    logged.notify_all();
  });
  const auto disk = FaultDisk::create(memory_storage(), [](const StorageCall& call) {
    // The lease is made, but its renewals fail.
    return call.op == StorageOp::kRename && call.index > 3 ? FaultAction::fail(EIO)
                                                           : FaultAction::pass();
  });
  {
    std::optional<Lease> lease;
    {
      int call = 0;
      const CallScope scope(&call);
      lease.emplace(disk->storage(), "lease", "temporary", std::chrono::milliseconds(1));
    }
    std::unique_lock lock(mutex);
    logged.wait(lock, [&] { return call_of_message.has_value(); });
    EXPECT_EQ(*call_of_message, nullptr);
  }
  set_log_sink({});
}

}  // namespace tilestone::engine::lease_test
