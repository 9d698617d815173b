#include "tilestone/engine/commit/lease_internal.h"

#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "tilestone/base/error.h"

namespace tilestone::engine {

class Lease::Renewal {
 public:
  Renewal(std::shared_ptr<Storage> storage, std::string name, std::string temp_name,
          std::chrono::duration<double> interval)
      : storage_(std::move(storage)),
        name_(std::move(name)),
        temp_name_(std::move(temp_name)),
        interval_(interval) {
    renew();
    // The thread belongs to no call (base/call_scope.h): it may outlive the call that made the
    // lease.
    thread_ = std::thread([this] { run(); });
  }

  ~Renewal() {
    {
      std::lock_guard lock(mutex_);
      ends_ = true;
    }
    wake_.notify_all();
    thread_.join();
    drop(name_);
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (!wake_.wait_for(lock, interval_, [&] { return ends_; })) {
      lock.unlock();
      renew();
      lock.lock();
    }
  }

  // The file need not be durable, because nobody holds the lease after a crash. A failed write is
  // tried again at the next interval.
  void renew() {
    try {
      ByteWriter out;
      out.u64(++count_);
      const auto file = storage_->create(temp_name_);
      file->append(ByteView(out.bytes()));
      file->close();
      storage_->rename(temp_name_, name_, true);
    } catch (const Error& error) {
      if (!std::exchange(failed_, true)) {
        log(LogLevel::kWarning,
            std::string(
                "a save's lease can't be renewed, so other processes may consider this rank "
                "dead: ") +
                error.what());
      }
      drop(temp_name_);
    }
  }

  void drop(const std::string& file) noexcept {
    try {
      storage_->remove(file);
    } catch (const Error&) {
      // It does not exist, or will be removed with the attempt's directory.
    }
  }

  const std::shared_ptr<Storage> storage_;
  const std::string name_, temp_name_;
  const std::chrono::duration<double> interval_;
  uint64_t count_ = 0;   // used by the constructor, then only by the thread
  bool failed_ = false;  // likewise; a failure was logged
  std::mutex mutex_;
  std::condition_variable wake_;
  bool ends_ = false;
  std::thread thread_;
};

Lease::Lease(std::shared_ptr<Storage> storage, std::string name, std::string temp_name,
             std::chrono::duration<double> interval)
    : renewal_(std::make_unique<PerProcess<Renewal>>(
          [=] { return std::make_unique<Renewal>(storage, name, temp_name, interval); })) {}

Lease::~Lease() = default;

}  // namespace tilestone::engine
