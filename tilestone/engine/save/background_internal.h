// One save in the background: its thread, and what is known of it.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/engine/run/pending_internal.h"
#include "tilestone/engine/save/async_save.h"
#include "tilestone/engine/save/in_flight_internal.h"
#include "tilestone/engine/save/lazy_staging_internal.h"
#include "tilestone/engine/save/request_internal.h"
#include "tilestone/engine/save/save_steps_internal.h"

namespace tilestone::engine {

// How long after its deadline a save may still say itself why it failed.
inline constexpr std::chrono::duration<double> kLateGrace{2};

class Background {
 public:
  struct About {
    std::string save_id;
    std::string location;  // for errors
    uint64_t bytes = 0;
    AsyncOptions::OnError on_error = AsyncOptions::OnError::kRaise;
    bool skipped = false;
  };
  // What the thread does.
  struct Work {
    // Makes the checkpoint durable. Before it returns or throws it releases all that the next save
    // may need: the location's lock and the session's memory.
    std::function<SaveResult()> save;
    // Called after the outcome is known here; ends by itself. May be empty.
    std::function<void()> tidy;
    std::shared_ptr<LazyStaging> lazy = nullptr;
  };

  // `interrupt`: what abandon() requests; the save's deadline has it.
  Background(About about, const Deadline& deadline, std::shared_ptr<Interrupt> interrupt);
  // Waits until the save has ended, except in a child process of fork(), and except for a thread
  // that is stuck in the system, which is left behind. Then log_failure().
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // The state may change.
  void note_staged() { shared_->staged->end(nullptr); }
  // On the program's thread, which changes no tensor meanwhile: ends lazy staging, and staged().
  void seal();
  // Starts the thread. Error(kIo) if there can't be one; then nothing of `work` was called.
  void start(Work work);
  // Instead of start(), for a save that ends in its call. `failure`: null if it ended well.
  void end(std::exception_ptr failure, const SaveResult& result = {});

  // Ends the save soon with Error(kInterrupted): "the save ... `why`".
  void abandon(const std::string& why = "was abandoned by its program");
  // Whether the save has failed, and the program does not know it.
  bool has_unheard_failure() const;
  // Logs such a failure.
  void log_failure() const;

  const About& about() const { return shared_->about; }
  const Pending& staged() const { return staged_; }
  const Pending& durable() const { return durable_; }
  Pending::State& durable_state() const { return *shared_->durable; }
  std::shared_ptr<Pending::State> outcome() const { return shared_->durable; }
  SaveResult result() const { return shared_->result; }  // once durable() has ended well
  // As the session's next save sees it.
  EarlierSave as_earlier(AsyncOptions::InFlight policy) const;
  bool belongs_here() const { return shared_->durable->belongs_here(); }
  // Whether its thread has ended, or there is none.
  bool is_over() const { return shared_->over; }

 private:
  void end_thread();

  // What the thread uses. It outlives this object if the thread is left behind.
  struct Shared {
    Shared(About given, const Deadline& limit, std::shared_ptr<Interrupt> stop);
    void run(const Work& work);
    const About about;
    const std::shared_ptr<Interrupt> interrupt;
    const std::shared_ptr<Pending::State> staged, durable;
    std::shared_ptr<LazyStaging> lazy;  // null: everything was staged in the call
    SaveResult result;                  // written before `durable` ends
    std::atomic<bool> over = true;
  };

  const std::shared_ptr<Shared> shared_;
  const Pending staged_, durable_;
  std::thread thread_;
};

// The asynchronous saves of one session, on one rank. Used by the session's thread.
class LastAsync {
 public:
  // The last save, which is sealed. nullopt if there is none in this process. `policy`: of the next
  // save.
  std::optional<EarlierSave> last(AsyncOptions::InFlight policy);
  void put(std::shared_ptr<Background> save);
  // The failure of the last save was reported.
  void forget();
  // Of the last save; null if there is none in this process.
  std::shared_ptr<Pending::State> outcome() const;

 private:
  std::shared_ptr<Background> last_;
  // Saves whose outcome is known, but whose threads have not ended.
  std::vector<std::shared_ptr<Background>> ending_;
};

// What the Python binding does with a save beyond its public interface.
struct OfAsyncSave {
  // Not in a child process of fork().
  static Background& of(const AsyncSave& save) { return *save.save_; }
  // Background::seal(). Throws in a forked child.
  static void seal(const AsyncSave& save) {
    static_cast<void>(save.staged().done());
    of(save).seal();
  }
};

// Plans, begins and stages a save, and starts its thread. call.deadline is that of the whole save;
// its interrupt ends only this call. Throws what async_save() throws.
std::shared_ptr<Background> save_in_background(const SaveCall& call, const AsyncOptions& async,
                                               const MadeRequest& request);

}  // namespace tilestone::engine
