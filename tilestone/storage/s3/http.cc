#include "tilestone/storage/s3/http.h"

#include <signal.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/storage/s3/transfer_internal.h"

namespace tilestone::s3 {

using Clock = std::chrono::steady_clock;

// Everything but start(), check_now() and the destructor runs on the thread.
class Http::Loop {
 public:
  Loop(HttpSettings settings, size_t in_progress);
  ~Loop();
  void start(std::shared_ptr<Exchange> exchange);
  void check_now();

 private:
  using ExchangePtr = std::shared_ptr<Exchange>;
  struct Running {
    std::unique_ptr<Transfer> transfer;
    ExchangePtr exchange;
  };

  void run();
  bool take_new();  // false: the end
  void start_due();
  void attempt(const ExchangePtr& exchange);
  void take_answers();
  void take_answer(CURL* handle, CURLcode code);
  void check_all();
  std::chrono::milliseconds time_to_wait() const;
  std::unique_ptr<Transfer> stop(std::map<CURL*, Running>::iterator running);
  void end_all();

  const HttpSettings settings_;
  const size_t in_progress_;
  const std::unique_ptr<CURLM, CURLMcode (*)(CURLM*)> multi_;
  std::multimap<Clock::time_point, ExchangePtr> waiting_;  // by when the next attempt is due
  std::map<CURL*, Running> running_;
  std::vector<std::unique_ptr<Transfer>> idle_;
  Clock::time_point checked_;
  std::atomic<bool> check_now_ = false;
  bool has_succeeded_ = false;

  std::mutex mutex_;  // guards the following
  std::vector<ExchangePtr> new_;
  bool stopping_ = false;
  std::thread thread_;  // the last, so that it begins when the rest is there
};

namespace {

constexpr std::chrono::milliseconds kCheck{20};     // the least time between two checks of all
constexpr std::chrono::milliseconds kNotYet{10};    // before an exchange is asked again
constexpr std::chrono::milliseconds kBusyWait{50};  // the longest wait while there are exchanges
constexpr std::chrono::milliseconds kIdleWait{60'000};

// What body() throws; null: nothing. The error is handed over outside of the catch block, so that
// the thread that waits for it is its only owner.
template <typename Body>
std::exception_ptr caught(const Body& body) {
  try {
    body();
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

// Those of the process are for other threads. OpenSSL's writes may raise SIGPIPE in this one.
void block_signals() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

CURLM* make_multi(size_t in_progress) {
  begin_curl();
  CURLM* const multi = curl_multi_init();
  if (multi == nullptr) throw std::bad_alloc();
  curl_multi_setopt(multi, CURLMOPT_MAXCONNECTS, static_cast<long>(in_progress));
  return multi;
}

}  // namespace

Http::Http(HttpSettings settings, size_t in_progress)
    : loop_(std::make_unique<Loop>(std::move(settings), in_progress)) {}
Http::~Http() = default;
void Http::start(std::shared_ptr<Exchange> exchange) { loop_->start(std::move(exchange)); }
void Http::check_now() { loop_->check_now(); }

Http::Loop::Loop(HttpSettings settings, size_t in_progress)
    : settings_(std::move(settings)),
      in_progress_(in_progress),
      multi_(make_multi(in_progress), curl_multi_cleanup),
      thread_([this] { run(); }) {}

Http::Loop::~Loop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  curl_multi_wakeup(multi_.get());
  thread_.join();
}

void Http::Loop::start(ExchangePtr exchange) {
  {
    const std::lock_guard lock(mutex_);
    new_.push_back(std::move(exchange));
  }
  curl_multi_wakeup(multi_.get());
}

void Http::Loop::check_now() {
  check_now_ = true;
  curl_multi_wakeup(multi_.get());
}

void Http::Loop::run() {
  block_signals();
  while (take_new()) {
    start_due();
    int count = 0;
    curl_multi_perform(multi_.get(), &count);
    take_answers();
    check_all();
    const auto wait = static_cast<int>(time_to_wait().count());
    curl_multi_poll(multi_.get(), nullptr, 0, wait, nullptr);
  }
  end_all();
}

bool Http::Loop::take_new() {
  const std::lock_guard lock(mutex_);
  for (ExchangePtr& exchange : new_) waiting_.emplace(Clock::now(), std::move(exchange));
  new_.clear();
  return !stopping_;
}

void Http::Loop::start_due() {
  while (running_.size() < in_progress_ && !waiting_.empty() &&
         waiting_.begin()->first <= Clock::now()) {
    const ExchangePtr exchange = std::move(waiting_.begin()->second);
    waiting_.erase(waiting_.begin());
    std::exception_ptr error = caught([&] {
      exchange->check();
      attempt(exchange);
    });
    if (error != nullptr) exchange->ended(std::move(error));
  }
}

void Http::Loop::attempt(const ExchangePtr& exchange) {
  std::optional<HttpRequest> request = exchange->next();
  if (!request) {
    waiting_.emplace(Clock::now() + kNotYet, exchange);
    return;
  }
  if (idle_.empty()) idle_.push_back(std::make_unique<Transfer>(settings_));
  CURL* const handle = idle_.back()->begin(std::move(*request), !has_succeeded_);
  curl_multi_add_handle(multi_.get(), handle);
  running_[handle] = {std::move(idle_.back()), exchange};
  idle_.pop_back();
}

void Http::Loop::take_answers() {
  int left = 0;
  while (const CURLMsg* const message = curl_multi_info_read(multi_.get(), &left)) {
    if (message->msg == CURLMSG_DONE) take_answer(message->easy_handle, message->data.result);
  }
}

void Http::Loop::take_answer(CURL* handle, CURLcode code) {
  const auto running = running_.find(handle);
  const ExchangePtr exchange = std::move(running->second.exchange);
  std::unique_ptr<Transfer> transfer = stop(running);
  std::optional<std::chrono::nanoseconds> pause;
  std::exception_ptr error = caught([&] {
    HttpAnswer answer = transfer->end(code);
    idle_.push_back(std::move(transfer));
    has_succeeded_ |= code == CURLE_OK && answer.status / 100 == 2;
    pause = exchange->answered(std::move(answer));
  });
  if (pause) {
    waiting_.emplace(Clock::now() + *pause, exchange);
  } else {
    exchange->ended(std::move(error));
  }
}

std::unique_ptr<Transfer> Http::Loop::stop(std::map<CURL*, Running>::iterator running) {
  curl_multi_remove_handle(multi_.get(), running->first);
  std::unique_ptr<Transfer> transfer = std::move(running->second.transfer);
  running_.erase(running);
  return transfer;
}

void Http::Loop::check_all() {
  if (!check_now_.exchange(false) && Clock::now() < checked_ + kCheck) return;
  checked_ = Clock::now();
  std::erase_if(waiting_, [](const auto& waiting) {
    std::exception_ptr error = caught([&] { waiting.second->check(); });
    const bool ends = error != nullptr;
    if (ends) waiting.second->ended(std::move(error));
    return ends;
  });
  for (auto each = running_.begin(); each != running_.end();) {
    const auto running = each++;
    const ExchangePtr exchange = running->second.exchange;
    std::exception_ptr error = caught([&] { exchange->check(); });
    if (error == nullptr) continue;
    stop(running);  // first, because ended() gives up the memory
    exchange->ended(std::move(error));
  }
}

std::chrono::milliseconds Http::Loop::time_to_wait() const {
  if (waiting_.empty()) return running_.empty() ? kIdleWait : kBusyWait;
  if (running_.size() >= in_progress_) return kBusyWait;
  const auto due =
      std::chrono::ceil<std::chrono::milliseconds>(waiting_.begin()->first - Clock::now());
  return std::clamp(due, std::chrono::milliseconds(0), kBusyWait);
}

void Http::Loop::end_all() {
  const auto error = std::make_exception_ptr(
      Error(ErrorCode::kInterrupted, "the client of the object store has ended"));
  while (!running_.empty()) {
    const ExchangePtr exchange = running_.begin()->second.exchange;
    stop(running_.begin());
    exchange->ended(error);
  }
  for (const auto& [due, exchange] : waiting_) exchange->ended(error);
}

}  // namespace tilestone::s3
