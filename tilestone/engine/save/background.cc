#include "tilestone/engine/save/background_internal.h"

#include <algorithm>
#include <utility>

#include "tilestone/base/call_scope.h"
#include "tilestone/base/error.h"

namespace tilestone {
namespace engine {
namespace {

Deadline late(const Deadline& deadline) {
  if (deadline.is_never()) return deadline;
  return Deadline::after(deadline.remaining() + kLateGrace);
}

std::string what_of(const Background::About& about) {
  return "the save " + about.save_id + " at " + about.location;
}

}  // namespace

Background::Shared::Shared(About given, const Deadline& limit, std::shared_ptr<Interrupt> stop)
    : about(std::move(given)),
      interrupt(std::move(stop)),
      staged(std::make_shared<Pending::State>(what_of(about), Deadline::never())),
      durable(std::make_shared<Pending::State>(what_of(about), late(limit))) {}

// A failure of `tidy` leaves leftovers.
void Background::Shared::run(const Work& work) {
  const CallScope scope({.step = durable.get()});
  std::exception_ptr failure;
  try {
    result = work.save();
  } catch (...) {
    failure = std::make_exception_ptr(current_error());
    staged->end(failure);  // if it was not staged before
  }
  durable->end(std::move(failure));
  try {
    if (work.tidy) work.tidy();
  } catch (...) {
    log(LogLevel::kDebug, std::string("small files of a save stay: ") + current_error().what());
  }
}

Background::Background(About about, const Deadline& deadline, std::shared_ptr<Interrupt> interrupt)
    : shared_(std::make_shared<Shared>(std::move(about), deadline, std::move(interrupt))),
      staged_(shared_->staged),
      durable_(shared_->durable) {}

Background::~Background() {
  if (!belongs_here()) {
    // The thread is the parent's. Its object must not be destroyed while it counts as joinable.
    if (thread_.joinable()) new std::thread(std::move(thread_));
    return;
  }
  if (thread_.joinable()) end_thread();
  log_failure();
}

void Background::end_thread() {
  // In a callback, on this thread or on one that works for the save.
  if (thread_.get_id() == std::this_thread::get_id() ||
      CallScope::current().step == shared_->durable.get()) {
    thread_.detach();
    return;
  }
  seal();
  durable_.wait();
  // The thread is stuck if the save has ended because its time is over. An interrupt may help.
  abandon();
  const Deadline patience = Deadline::after(kLateGrace);
  while (!shared_->over && !patience.expired()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  shared_->over ? thread_.join() : thread_.detach();
}

bool Background::has_unheard_failure() const {
  Pending::State& durable = durable_state();
  return durable.done() && durable.failure(false) != nullptr && !durable.was_asked();
}

void Background::log_failure() const {
  if (!has_unheard_failure()) return;
  try {
    std::rethrow_exception(durable_state().failure(true));
  } catch (...) {
    log(LogLevel::kWarning,
        what_of(about()) +
            " has failed, and nobody has asked for its result: " + current_error().what());
  }
}

// Not in a callback of the save: the program may be in an operation, and the wait that follows
// throws.
void Background::seal() {
  if (shared_->lazy == nullptr || CallScope::current().step == shared_->durable.get()) return;
  shared_->staged->end(shared_->lazy->seal());
}

void Background::start(Work work) {
  shared_->lazy = work.lazy;
  shared_->over = false;
  try {
    thread_ = std::thread([shared = shared_, work = std::move(work)]() mutable {
      shared->run(work);
      work = {};  // what it owns is released before the thread counts as ended
      shared->over = true;
    });
  } catch (...) {
    shared_->over = true;
    throw current_error();
  }
}

void Background::end(std::exception_ptr failure, const SaveResult& result) {
  shared_->result = result;
  shared_->staged->end(failure);
  shared_->durable->end(std::move(failure));
}

EarlierSave Background::as_earlier(AsyncOptions::InFlight policy) const {
  return {shared_->durable, shared_->interrupt, about().on_error == AsyncOptions::OnError::kWarn,
          policy == AsyncOptions::InFlight::kWait, policy == AsyncOptions::InFlight::kSkip};
}

std::optional<EarlierSave> LastAsync::last(AsyncOptions::InFlight policy) {
  std::erase_if(ending_, [](const auto& save) { return save->is_over(); });
  if (last_ == nullptr || !last_->belongs_here()) return std::nullopt;
  last_->seal();
  return last_->as_earlier(policy);
}

void LastAsync::put(std::shared_ptr<Background> save) {
  forget();
  last_ = std::move(save);
}

void LastAsync::forget() {
  if (const auto known = outcome()) {
    static_cast<void>(known->failure(true));
    if (!last_->is_over()) ending_.push_back(last_);
  }
  // In a forked child the destructor does nothing.
  last_.reset();
}

std::shared_ptr<Pending::State> LastAsync::outcome() const {
  if (last_ == nullptr || !last_->belongs_here()) return nullptr;
  return last_->outcome();
}

void Background::abandon(const std::string& why) {
  shared_->interrupt->request(
      std::make_exception_ptr(Error(ErrorCode::kInterrupted, what_of(about()) + " " + why)));
}

}  // namespace engine

AsyncSave::AsyncSave(std::shared_ptr<engine::Background> save) : save_(std::move(save)) {}

const std::string& AsyncSave::save_id() const { return save_->about().save_id; }
uint64_t AsyncSave::bytes() const { return save_->about().bytes; }
bool AsyncSave::skipped() const { return save_->about().skipped; }
const Pending& AsyncSave::staged() const { return save_->staged(); }
const Pending& AsyncSave::durable() const { return save_->durable(); }

SaveResult AsyncSave::result(double timeout) const {
  save_->durable().get(timeout);
  return save_->result();
}

SaveResult AsyncSave::result(Deadline deadline, double timeout) const {
  save_->durable().get(std::move(deadline), timeout);
  return save_->result();
}

bool AsyncSave::finished() const { return save_->durable().done() && save_->is_over(); }

void AsyncSave::abandon() const {
  static_cast<void>(save_->durable().done());  // throws in a forked child
  // Who abandons a save knows that it fails: the next save does not say so again.
  save_->durable_state().failure(true);
  save_->abandon();
}

}  // namespace tilestone
