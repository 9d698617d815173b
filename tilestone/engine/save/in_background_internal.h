// The driver of a save whose ranks have planned by rounds, and meet in files from then on
// (background_meeting.cc).
#pragma once

#include <memory>
#include <optional>

#include "tilestone/base/deadline.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/engine/run/rounds_internal.h"
#include "tilestone/engine/save/background_meeting_internal.h"
#include "tilestone/engine/save/hold_internal.h"
#include "tilestone/engine/save/planned_internal.h"
#include "tilestone/engine/save/session_parts_internal.h"
#include "tilestone/engine/write/stage_internal.h"
#include "tilestone/plan/receipt.h"

namespace tilestone::engine {

// What a rank has made of its share when the call of an asynchronous save returns.
struct StagedShare {
  PlannedShare planned;
  std::shared_ptr<StagingMemory> memory;
  std::optional<Receipt> written;            // what was not staged
  std::optional<BackgroundMeeting> meeting;  // of the save's ranks; not of a save to a fast tier
  bool is_whole = true;                      // no rank has written anything yet
};

// Takes from the share's assignment the tensors for which `most` bytes of staging memory have no
// room.
Assignment take_what_exceeds(SaveShare& share, uint64_t most);

// The last round of the call: each rank writes the tensors for which `most` bytes have no room,
// straight from their memory, and then stages the others. If a rank fails, every rank throws, and
// the save has ended. `lazy`: see stage_share().
StagedShare stage_by_rounds(Rounds& rounds, PlannedShare planned, std::optional<uint64_t> most,
                            SessionParts* session, const std::shared_ptr<LazyStaging>& lazy);

// Writes what was staged. `before`: the receipt of what was not, which is joined; taken.
Receipt write_staged(PlannedShare& planned, std::optional<Receipt>& before, SessionParts* session,
                     const Deadline& deadline);

// One rank's save after the call. Its functions are called by the save's thread.
class InBackground {
 public:
  // `deadline`: with the interrupt that abandons the save. `hold`: null if the save is not held.
  InBackground(StagedShare staged, std::shared_ptr<SessionParts> session, Deadline deadline,
               std::shared_ptr<Hold> hold);

  // Writes, and publishes or waits until the coordinator has. Releases memory and lock at the end,
  // well or not.
  SaveResult save();
  // Removes the small files. Takes a few seconds at most.
  void tidy() noexcept;
  // Instead of save(), if the thread can't be started.
  void give_up(const Error& why) noexcept;

 private:
  Error named(Error error) const;
  Receipt write();
  void note_reported(StepTimes::Clock::time_point began);
  void release();
  void publish();
  void end_badly(const Error& error) noexcept;
  void report_and_wait();

  PlannedShare planned_;
  std::shared_ptr<StagingMemory> memory_;
  std::optional<Receipt> before_;
  std::shared_ptr<SessionParts> session_;
  const Deadline deadline_;
  const std::shared_ptr<Hold> hold_;
  const bool is_coordinator_;
  BackgroundMeeting meeting_;
  StepTimes::Clock::time_point reported_ = {};
};

}  // namespace tilestone::engine
