#include "tilestone/cli/stopping.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <exception>
#include <thread>

namespace tilestone::cli {
namespace {

constexpr std::array kSignals = {SIGINT, SIGTERM, SIGHUP};
std::atomic<int> signal_pipe = -1;  // the end that the handler writes to

// Only async-signal-safe calls. The watcher thread does the rest.
void on_signal(int number) {
  const int before = errno;
  const auto byte = static_cast<unsigned char>(number);
  [[maybe_unused]] const ssize_t written = ::write(signal_pipe.load(), &byte, 1);
  errno = before;
}

// While it exists, the signals request the interrupt. Sets `came` at its end: the signal that has
// come.
class Watcher {
 public:
  explicit Watcher(int& came) : came_(came) {
    if (::pipe2(ends_, O_CLOEXEC) != 0) {
      throw Error(ErrorCode::kIo, "cannot make a pipe").with_errno(errno);
    }
    signal_pipe = ends_[1];
    thread_ = std::thread([this] { watch(); });
    for (size_t i = 0; i < kSignals.size(); ++i) {
      struct sigaction action = {};
      action.sa_handler = on_signal;
      action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
      ::sigaction(kSignals[i], nullptr, &old_[i]);
      if (old_[i].sa_handler != SIG_IGN) ::sigaction(kSignals[i], &action, nullptr);
    }
  }
  ~Watcher() {
    for (size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &old_[i], nullptr);
    on_signal(0);
    thread_.join();
    came_ = signal_;
    signal_pipe = -1;
    ::close(ends_[0]);
    ::close(ends_[1]);
  }
  Watcher(const Watcher&) = delete;
  Watcher& operator=(const Watcher&) = delete;

  std::shared_ptr<const Interrupt> interrupt() const { return interrupt_; }

 private:
  void watch() {
    unsigned char number = 0;
    ssize_t got = 0;
    while ((got = ::read(ends_[0], &number, 1)) == 1 || (got < 0 && errno == EINTR)) {
      if (got < 0) continue;
      if (number == 0) return;
      signal_ = number;
      interrupt_->request(std::make_exception_ptr(
          Error(ErrorCode::kInterrupted, "a signal has ended the command")));
    }
  }

  int& came_;
  int ends_[2] = {-1, -1};
  struct sigaction old_[kSignals.size()] = {};
  const std::shared_ptr<Interrupt> interrupt_ = std::make_shared<Interrupt>();
  int signal_ = 0;  // of the thread until it has ended
  std::thread thread_;
};

}  // namespace

void end_in_order(const std::function<void(std::shared_ptr<const Interrupt>)>& work) {
  std::exception_ptr failure;
  int number = 0;
  {
    const Watcher watcher(number);
    try {
      work(watcher.interrupt());
    } catch (...) {
      failure = std::current_exception();
    }
  }
  if (failure == nullptr) return;
  if (number != 0) {
    ::signal(number, SIG_DFL);
    ::raise(number);
  }
  std::rethrow_exception(failure);
}

}  // namespace tilestone::cli
