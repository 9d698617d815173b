// A claim where nothing ends with its process: an object, which the process must renew.
//
//  1. Take: the object is put if absent. Its text has an id that nobody else has, and a number that
//     grows, so each put of it has another tag.
//  2. Renew: a thread puts it again each period, if it still has the tag of the put before.
//  3. Take over: the object has lapsed if its tag has stayed the same for kLapsed periods by the
//     clock of who looks at it; or for kWatched, if the store's own clock, the date of the same
//     answer, says that it is kLapsed periods old. Then it is put if it still has that tag. No
//     clocks of two hosts are compared. Who only asks (is_leased()) believes the store's clock.
//  4. Release: it is removed if it still has the tag of the last put. Its holder does not look
//     first while it is sure of its claim.
//
// The holder is sure of its claim until kSure periods after it has begun its last put that has
// succeeded. That ends before the lease can lapse, as the store has executed the put later than
// that; a request that the holder has begun has a period's time to arrive. Then it must not change
// what others may change under the claim, until it has renewed the lease: the tag is the same, so
// nobody had it meanwhile. If the tag is another's, it has lost the claim for good.
//
// An answer that is lost: the object's text says whose it is. A crash at any point leaves nothing,
// or an object that lapses. A store that ignores the condition of a removal removes what another
// process has put between a look and the removal: the holder must be late by a period, and then
// its successor finds at its next put that it has lost the claim.
#include "tilestone/storage/lease.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/host.h"
#include "tilestone/base/pause.h"
#include "tilestone/base/per_process.h"
#include "tilestone/base/uuid.h"
#include "tilestone/storage/names_internal.h"

namespace tilestone {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr int kSure = 3, kLapsed = 4;  // periods
constexpr double kWatched = 1.5;       // at least: the two times of an age may be of two clocks
constexpr Seconds kSilent{1};          // who waits longer says so
constexpr uint64_t kMaxText = 1024;    // bytes

std::atomic<double> the_period = 10;  // seconds

class Lease : public StorageClaim {
 public:
  Lease(std::shared_ptr<Storage> storage, std::string name, Seconds period)
      : storage_(std::move(storage)), name_(std::move(name)), period_(period) {}
  ~Lease() override {
    if (process_ != ::getpid()) static_cast<void>(renewer_.release());  // the parent's
    if (!may_stand_ || process_ != ::getpid()) return;
    interrupt_->request(
        std::make_exception_ptr(Error(ErrorCode::kInterrupted, "the claim is released")));
    renewer_.reset();
    try {
      release();
    } catch (...) {
      log(LogLevel::kDebug,
          std::string("a claim stays until it lapses: ") + current_error().what());
    }
  }

  // Puts the object under the condition. False: it does not hold.
  bool take(const Condition& condition, const Deadline& patience) {
    const bool is_short = patience.remaining() < kSure * period_;
    may_stand_ = true;  // even if there is no answer
    may_stand_ = put(condition, is_short ? Deadline::after(kSure * period_) : patience);
    if (may_stand_) start_renewer();
    return may_stand_;
  }

  Deadline held_until(const Deadline& deadline) override {
    if (process_ != ::getpid()) return Deadline::after(Seconds(0));
    if (is_late()) renew(deadline);
    return Deadline::after(sure_until_.load() - Clock::now());
  }

  // Called by the thread, too.
  void renew(const Deadline& deadline) {
    const std::lock_guard lock(mutex_);
    next_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(period_);
    try {
      is_cut_off_ = false;
      if (is_lost_ || put_again(deadline)) return;
      is_lost_ = true;
      sure_until_ = Clock::time_point();
      log(LogLevel::kWarning, "another process has taken over the claim " + name_ + " at " +
                                  storage_->describe() +
                                  ", which this one had not renewed in time");
    } catch (...) {
      const Error error = current_error();
      is_cut_off_ = error.code() != ErrorCode::kInterrupted;
      log(LogLevel::kDebug, std::string("a claim was not renewed: ") + error.what());
    }
  }

 private:
  void start_renewer() {
    try {
      renewer_ = std::make_unique<std::jthread>(
          [this](const std::stop_token& stop) { renew_until(stop); });
    } catch (const std::system_error& error) {
      throw Error(ErrorCode::kIo, std::string("no thread can renew a claim: ") + error.what());
    }
  }

  void renew_until(const std::stop_token& stop) {
    std::mutex mutex;
    std::condition_variable_any stopped;
    std::unique_lock lock(mutex);
    while (!stop.stop_requested()) {
      stopped.wait_until(lock, stop, next_.load(), [] { return false; });
      if (Clock::now() < next_.load()) continue;
      renew(Deadline::after(period_).with_interrupt(interrupt_));
    }
  }

  bool is_late() const { return Clock::now() >= sure_until_.load(); }

  // For calls that take no deadline.
  std::shared_ptr<Storage> in_time(const Deadline& deadline) {
    deadline.expired();  // throws where the claim is released
    return storage_->until(Deadline::after(std::min<Seconds>(deadline.remaining(), period_))
                               .with_interrupt(deadline.interrupt()));
  }

  // Where the put does not say its tag, that is asked for while nobody else can have put it.
  bool put(const Condition& condition, const Deadline& deadline) {
    const auto began = Clock::now();
    const std::string text = holder_ + ", number " + std::to_string(++number_);
    tag_.clear();
    const auto tag = storage_->put_for_tag(name_, as_bytes(text), condition, scratch_, deadline);
    if (!tag) return false;
    sure_until_ = began + std::chrono::duration_cast<Clock::duration>(kSure * period_);
    next_ = began + std::chrono::duration_cast<Clock::duration>(period_);
    tag_ = *tag;
    if (!tag_.empty()) return true;
    if (const auto info = in_time(deadline)->stat(name_); info && !is_late()) tag_ = info->tag;
    return true;
  }

  // An earlier put of its own, whose answer was lost, may come late. False: it is lost.
  bool put_again(const Deadline& deadline) {
    constexpr int kTries = 4;
    for (int tries = 0; tries < kTries; ++tries) {
      if (tag_.empty()) tag_ = own_tag(deadline);
      if (tag_.empty()) return false;
      if (put(Condition::has(tag_), deadline)) return true;
    }
    throw Error(ErrorCode::kIo, "it changes again and again").with_file(name_);
  }

  // Of the object, if it is this lease's; else "".
  std::string own_tag(const Deadline& deadline) {
    const auto store = in_time(deadline);
    const auto info = store->stat(name_);
    if (!info) return "";
    try {
      const Bytes bytes = read_file(*store, name_, kMaxText);
      return as_text(bytes).starts_with(holder_ + ",") ? info->tag : "";
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kNotFound && error.code() != ErrorCode::kCorrupt) throw;
      return "";
    }
  }

  void release() {
    if (is_lost_ || is_cut_off_) return;
    const Deadline end = Deadline::after(period_);
    for (int tries = 0; tries < 2; ++tries) {
      if (tag_.empty()) tag_ = own_tag(end);
      if (tag_.empty() || remove(end)) return;
      tag_.clear();
    }
  }
  // A store that ignores the condition is asked only as long as nobody else can have taken over.
  bool remove(const Deadline& end) {
    if (is_late()) return storage_->remove_if(name_, tag_, end);
    const Deadline sure = Deadline::after(sure_until_.load() - Clock::now());
    return storage_->remove_if(name_, tag_, sure.when() < end.when() ? sure : end, true);
  }

  const pid_t process_ = ::getpid();
  const std::shared_ptr<Storage> storage_;
  const std::string name_;
  const Seconds period_;
  const std::string id_ = random_uuid();
  const std::string holder_ = this_process() + ", lease " + id_;
  const std::string scratch_ = name_.substr(0, name_.rfind('/') + 1) + id_ + ".lease.tmp";
  const std::shared_ptr<Interrupt> interrupt_ = std::make_shared<Interrupt>();  // the release
  bool may_stand_ = false;                                                      // the object
  std::atomic<Clock::time_point> sure_until_ = Clock::time_point();
  std::atomic<Clock::time_point> next_ = Clock::time_point();  // renewal

  std::mutex mutex_;  // of one renewal, and of what follows
  std::string tag_;   // "": not known
  int number_ = 0;
  bool is_lost_ = false, is_cut_off_ = false;  // by the last request

  std::unique_ptr<std::jthread> renewer_;  // the last, because it uses the others
};

// Of a lock: it was copied with a directory.
bool is_empty(const FileInfo& info) { return info.size == 0; }

bool has_lapsed(const FileInfo& info, Seconds period) {
  return info.least_age && Seconds(*info.least_age) >= kLapsed * period;
}

struct Watched {
  std::string tag;
  Clock::time_point since, last;  // of the looks that have found it
};

struct AllWatched {
  std::mutex mutex;
  std::map<std::pair<std::string, std::string>, Watched> by_name;
};

// How long this process has seen the object with its tag, if it has looked in each period. Not
// every store knows ages.
Seconds watched_for(const Storage& storage, const std::string& name, const std::string& tag,
                    Seconds period) {
  static auto& of_process =
      *new PerProcess<AllWatched>([] { return std::make_unique<AllWatched>(); });
  AllWatched& all = of_process.get();
  const auto now = Clock::now();
  const std::lock_guard lock(all.mutex);
  Watched& watched = all.by_name[{storage.describe(), name}];
  if (watched.tag != tag || now - watched.last > period) watched = {tag, now, now};
  watched.last = now;
  return now - watched.since;
}

[[noreturn]] void fail_no_conditions(Storage& storage, const std::string& name) {
  throw Error(ErrorCode::kUnsupported,
              "names can't be claimed in " + storage.describe() + ": it has no conditional writes")
      .with_file(name);
}

bool has_conditions(Storage& storage) {
  const StorageFacts facts = storage.facts();
  return facts.put_if_absent && facts.put_if_tag;
}

// The first put of a lease, which finds out whether there are conditions.
bool take_first(Storage& storage, const std::string& name, std::unique_ptr<Lease>& lease,
                const Deadline& patience) {
  if (!has_conditions(storage)) fail_no_conditions(storage, name);
  const bool is_mine = lease->take(Condition::absent(), patience);
  if (has_conditions(storage)) return is_mine;
  if (is_mine) lease.reset();
  fail_no_conditions(storage, name);
}

}  // namespace

Seconds lease_period() { return Seconds(the_period.load()); }

void set_lease_period(Seconds period) { the_period = period.count(); }

std::unique_ptr<StorageClaim> claim_lease(const std::shared_ptr<Storage>& storage,
                                          const std::string& name, Seconds period,
                                          const Deadline& patience) {
  check_file_name(name);
  auto lease = std::make_unique<Lease>(storage, name, period);
  bool is_mine = take_first(*storage, name, lease, patience);
  std::string seen;  // the tag at the first look
  Clock::time_point since;
  bool has_said = false;
  const auto in_time = storage->until(patience);
  for (Seconds wait = period / 100; !is_mine; wait = std::min(1.5 * wait, period / 10)) {
    const auto found = in_time->stat(name);
    if (!found) {
      is_mine = lease->take(Condition::absent(), patience);
      continue;
    }
    if (seen.empty()) {
      seen = found->tag;
      since = Clock::now();
    }
    if (found->tag != seen) return nullptr;  // its holder lives
    const Seconds watched = Clock::now() - since;
    const double enough = has_lapsed(*found, period) ? kWatched : kLapsed;
    if (is_empty(*found) || watched >= enough * period) {
      is_mine = lease->take(Condition::has(seen), patience);
      continue;
    }
    if (patience.expired()) return nullptr;
    if (!has_said && watched >= kSilent) {
      has_said = true;
      log(LogLevel::kInfo, "waiting until it shows whether the process lives that has claimed " +
                               name + " at " + storage->describe());
    }
    pause(wait, patience);
  }
  return lease;
}

bool is_leased(Storage& storage, const std::string& name, Seconds period) {
  check_file_name(name);
  const auto found = storage.stat(name);
  if (found && !has_conditions(storage)) fail_no_conditions(storage, name);
  return found && !is_empty(*found) && !has_lapsed(*found, period) &&
         watched_for(storage, name, found->tag, period) < kLapsed * period;
}

}  // namespace tilestone
