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
  explicit SaveInSteps(std::unique_ptr<Coordination> coordination);
  ~SaveInSteps();
  SaveInSteps(const SaveInSteps&) = delete;
  SaveInSteps& operator=(const SaveInSteps&) = delete;

  // Call each once, in this order; stage() may be left out. Keeps `bring`, and with it what it
  // owns, until the payload is staged or written, or the save has ended.
  void plan(const Bring& bring);
  void stage();
  void write();
  void report();
  SaveResult publish();

  const SaveShare& share() const { return coordination_->share(); }

 private:
  void take(const std::function<void()>& step);
  bool is_in_child() const;
  void stage_share();
  void release_tensors();

  const int process_;  // the process that has begun the save
  std::unique_ptr<Coordination> coordination_;
  Bring brought_by_;  // null once the payload is staged or written
  std::shared_ptr<StagingMemory> memory_;
  // The next step, for the error "gave up the save before it was ...".
  const char* next_ = "planned";
  bool is_over_ = false;
};

// Returns the threads that copy `bytes` together with the calling thread; `option` is
// SaveOptions::threads. They are the session's if `session` is not null. Null if the calling thread
// alone is faster.
std::shared_ptr<ThreadPool> staging_threads(uint64_t bytes, int option, SessionParts* session);

// Takes the first step of a save.
PlannedSave begin_in_steps(std::unique_ptr<Coordination> coordination, const Bring& bring);
// Takes all steps, without staging.
SaveResult save_in_a_row(std::unique_ptr<Coordination> coordination, const Bring& bring);

}  // namespace tilestone::engine
