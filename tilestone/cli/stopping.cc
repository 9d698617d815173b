#include "tilestone/cli/stopping.h"

#include <signal.h>

#include <atomic>
#include <ctime>
#include <exception>
#include <thread>

namespace tilestone::cli {
namespace {

// Those that the process does not ignore.
sigset_t ending_signals() {
  sigset_t signals;
  ::sigemptyset(&signals);
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction action = {};
    ::sigaction(number, nullptr, &action);
    if (action.sa_handler != SIG_IGN) ::sigaddset(&signals, number);
  }
  return signals;
}

}  // namespace

void end_in_order(const std::function<void(std::shared_ptr<const Interrupt>)>& work) {
  const sigset_t signals = ending_signals();
  sigset_t before;
  ::pthread_sigmask(SIG_BLOCK, &signals, &before);  // also in the threads that the work starts
  const auto interrupt = std::make_shared<Interrupt>();
  std::atomic<bool> ended = false;
  std::atomic<int> came = 0;  // the signal
  std::thread watcher([&] {
    constexpr timespec kLook{0, 5'000'000};
    while (!ended) {
      const int number = ::sigtimedwait(&signals, nullptr, &kLook);
      if (number <= 0) continue;
      ::pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);  // a second one ends the process
      came = number;
      interrupt->request(std::make_exception_ptr(
          Error(ErrorCode::kInterrupted, "a signal has ended the command")));
      while (!ended) std::this_thread::sleep_for(std::chrono::nanoseconds(kLook.tv_nsec));
    }
  });
  std::exception_ptr failure;
  try {
    work(interrupt);
  } catch (...) {
    failure = std::current_exception();
  }
  ended = true;
  watcher.join();
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (failure == nullptr) return;
  if (came != 0) ::raise(came);
  std::rethrow_exception(failure);
}

}  // namespace tilestone::cli
