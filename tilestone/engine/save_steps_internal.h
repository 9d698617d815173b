// The steps of a save, independent of how the ranks coordinate.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "tilestone/engine/coordination_internal.h"
#include "tilestone/engine/save_steps.h"
#include "tilestone/engine/write/stage_internal.h"

namespace tilestone::engine {

// One save in progress. The destructor gives the save up if it has not ended. In a child process of
// fork() the save still belongs to the parent: each step throws Error(kUnsupported), and the
// destructor changes nothing.
class SaveInSteps {
 public:
  // `session`: the session whose threads and staging memory are used; may be null.
  explicit SaveInSteps(std::unique_ptr<Coordination> coordination,
                       std::shared_ptr<SessionParts> session = nullptr);
  ~SaveInSteps();
  SaveInSteps(const SaveInSteps&) = delete;
  SaveInSteps& operator=(const SaveInSteps&) = delete;

  // Call each once, in this order; stage() may be left out.
  void plan(const Bring& bring);
  void stage();
  void write();
  void report();
  SaveResult publish();

  const SaveShare& share() const { return coordination_->share(); }
  // Keeps an object alive until the payload is staged or written, or the save has ended.
  void keep(std::shared_ptr<const void> kept) { kept_ = std::move(kept); }

 private:
  void take(const std::function<void()>& step);
  bool is_in_child() const;
  void stage_share();
  void release_tensors();

  const int process_;  // the process that has begun the save
  std::unique_ptr<Coordination> coordination_;
  std::shared_ptr<SessionParts> session_;
  std::shared_ptr<const void> kept_;
  std::shared_ptr<StagingMemory> memory_;
  // The next step, for the error "gave up the save before it was ...".
  const char* next_ = "planned";
  bool is_over_ = false;
};

// Returns the threads that copy `bytes` together with the calling thread; `option` is
// SaveOptions::threads. They are the session's if `session` is not null. Null if the calling thread
// alone is faster.
std::shared_ptr<ThreadPool> staging_threads(uint64_t bytes, int option, SessionParts* session);

// Begins a save with the coordination and the timeout that the options ask for.
std::unique_ptr<SaveInSteps> steps_of(const Location& location, const SaveOptions& options,
                                      const std::shared_ptr<SessionParts>& session = nullptr);
// Runs all steps, without staging.
SaveResult save_in_a_row(SaveInSteps& save, const Bring& bring);
// Plans the request that `prepare` returns, and keeps the request alive as begin_save() with
// `prepare` does.
PlannedSave planned_by_request(std::unique_ptr<SaveInSteps> save,
                               const std::function<SaveRequest()>& prepare);

}  // namespace tilestone::engine
