// A save in steps, independent of how the ranks meet: the same files, errors and rounds as save().
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <variant>

#include "tilestone/base/deadline.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/engine/run/step_times_internal.h"
#include "tilestone/engine/save/by_files_internal.h"
#include "tilestone/engine/save/by_rounds_internal.h"
#include "tilestone/engine/save/hold_internal.h"
#include "tilestone/engine/save/planned_internal.h"
#include "tilestone/engine/save/request_internal.h"
#include "tilestone/engine/save/save.h"
#include "tilestone/engine/save/session_parts_internal.h"

namespace tilestone::engine {

// How the ranks of a save meet: by files if options.by_files is set, otherwise in rounds of
// options.comm.
struct SaveCall {
  const Location& location;
  const SaveOptions& options;
  Deadline deadline;
  std::shared_ptr<SessionParts> session = nullptr;  // the session that makes the save
  std::shared_ptr<LazyStaging> lazy = nullptr;      // only of saves in the background
  std::shared_ptr<Hold> hold = nullptr;             // the same
};

// One save in progress. A step that fails ends it, as a failed save() does. The destructor gives
// the save up if it has not ended: the data files that this rank has written are removed, and the
// other ranks end with Error(kInterrupted) and this rank's number. By files this holds only until
// the rank has reported; a save that was given up can be completed by making it again (see
// ByFiles::token), and a reported one needs nothing more from this rank.
//
// Used by one thread at a time. With a communicator all ranks must begin, report and publish
// together, and no other save or load of this process may use the group until the save has ended.
class SaveInSteps {
 public:
  // Throws what the constructors of SavingByRounds and SavingByFiles throw.
  explicit SaveInSteps(const SaveCall& call);
  ~SaveInSteps();
  SaveInSteps(const SaveInSteps&) = delete;
  SaveInSteps& operator=(const SaveInSteps&) = delete;

  // Call each once, in this order; stage() may be left out.
  // After it values and objects are the save's own; tensors are views of the caller's memory.
  void plan(const MadeRequest& request);
  // Copies the tensors that this rank writes, including those inside objects.
  void stage(const std::shared_ptr<LazyStaging>& lazy);
  // Writes this rank's data files and makes them durable. A failure is kept, and report() throws
  // it. An interrupt, or an exception from a progress callback, may be thrown by either call.
  void write();
  // With a communicator, if any rank failed to write, every rank throws the same Error.
  void report();
  SaveResult publish();

  const SaveShare& share() const { return planned().share; }
  // Of the elements of the tensors that this rank writes, with copies. 0 if its part was already
  // saved before (by files).
  uint64_t bytes() const { return share().bytes(); }

 private:
  using Saving = std::variant<SavingByRounds, SavingByFiles>;
  static std::unique_ptr<Saving> begun(const SaveCall& call);
  PlannedShare& planned() const;
  KeptResources* kept() const { return session_ ? &session_->resources : nullptr; }
  void run_step(const std::function<void()>& step);
  void give_up(const Error& why) noexcept;

  const StepTimes::Clock::time_point began_ = StepTimes::Clock::now();
  const Deadline deadline_;
  const std::shared_ptr<SessionParts> session_;
  std::unique_ptr<Saving> saving_;
  std::shared_ptr<StagingMemory> memory_;
  // The next step, for the error "gave up the save before it was ...".
  const char* next_ = "planned";
  bool is_over_ = false;
};

// Takes the first step of a save. A rank that has no request throws why, also if the ranks could
// not meet. `call` and `request` may be destroyed when this returns.
std::unique_ptr<SaveInSteps> planned_save(const SaveCall& call, const MadeRequest& request);
// Takes all steps, without staging.
SaveResult save_in_a_row(const SaveCall& call, const MadeRequest& request);

}  // namespace tilestone::engine
