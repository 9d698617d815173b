// A storage for tests that need a save to be in flight.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>

#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"

namespace tilestone {

// A storage whose writes of data wait until they are let through, or fail.
class Gate {
 public:
  explicit Gate(std::shared_ptr<Storage> inner = memory_storage())
      : disk_(FaultDisk::create(std::move(inner), [this](const StorageCall& call) {
          if (call.op != StorageOp::kAppend || !call.name.ends_with(".distcp")) {
            return FaultAction::pass();
          }
          std::unique_lock lock(mutex_);
          ++waiting_;
          changed_.notify_all();
          changed_.wait(lock, [&] { return open_; });
          return error_ != 0 ? FaultAction::fail(error_) : FaultAction::pass();
        })) {}
  ~Gate() { open(); }

  std::shared_ptr<Storage> storage() const { return disk_->storage(); }
  void open() { set(true, 0); }
  void open_and_fail(int error) { set(true, error); }
  void close() { set(false, 0); }
  void wait_until_one_waits() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_ > 0; });
  }

 private:
  void set(bool open, int error) {
    const std::lock_guard lock(mutex_);
    open_ = open;
    error_ = error;
    waiting_ = 0;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
  int error_ = 0;
  int waiting_ = 0;
  const std::shared_ptr<FaultDisk> disk_;
};

}  // namespace tilestone
