// Holds an object that belongs to one process: threads, queues to the kernel, locks that another
// thread may hold. A forked child inherits copies of such objects that do not work.
#pragma once

#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <utility>

namespace tilestone {

// One T per process. A forked child makes a new T at its first get() and never touches the
// inherited one. Thread-safe.
template <typename T>
class PerProcess {
 public:
  using Make = std::function<std::unique_ptr<T>()>;

  // Makes the T of this process now.
  explicit PerProcess(Make make) : make_(std::move(make)), slot_(make_slot().release()) {}
  // An inherited T is not destroyed, because its threads can't be joined in this process.
  ~PerProcess() {
    OfProcess* const slot = slot_.load();
    if (slot->process == ::getpid()) delete slot;
  }
  PerProcess(const PerProcess&) = delete;
  PerProcess& operator=(const PerProcess&) = delete;

  T& get() const {
    OfProcess* slot = slot_.load(std::memory_order_acquire);
    if (slot->process == ::getpid()) return *slot->value;
    std::unique_ptr<OfProcess> fresh = make_slot();
    if (slot_.compare_exchange_strong(slot, fresh.get())) slot = fresh.release();
    return *slot->value;
  }
  T& operator*() const { return get(); }
  T* operator->() const { return &get(); }

 private:
  struct OfProcess {
    pid_t process;
    std::unique_ptr<T> value;
  };
  std::unique_ptr<OfProcess> make_slot() const {
    return std::make_unique<OfProcess>(OfProcess{::getpid(), make_()});
  }

  const Make make_;
  mutable std::atomic<OfProcess*> slot_;
};

}  // namespace tilestone
