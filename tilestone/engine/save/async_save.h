// Saves that don't stop the training.
//
//   AsyncSave saving = session.async_save(state, location, options);   // the state may change now
//   ...                                                                // the training goes on
//   SaveResult result = saving.result();                               // the checkpoint exists
//
// The call plans, begins the save at the location, and copies what this rank writes into staging
// memory. Then a thread of the save's own writes, and the checkpoint is published. That thread uses
// no communicator, so nothing runs beside the program's own collectives:
//
//  - With a communicator, the ranks meet in the call. Afterwards each rank leaves its receipt as a
//    small file, and only the coordinator (rank 0) publishes, under the location's lock, which it
//    holds since it planned. The others wait for the outcome, a file too (background_meeting.cc).
//    Formats, dialects, `overwrite`, errors and leftovers are those of save().
//  - By files (SaveOptions::by_files), the rules are those of saves by files.
//
// What was at the location before stands until the new checkpoint is published. Loads see it until
// then. A second save to the same location is refused meanwhile.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "tilestone/engine/run/options.h"
#include "tilestone/state/state_dict.h"

namespace tilestone {

namespace engine {
class Background;
struct OfAsyncSave;
}  // namespace engine

// A save that goes on in the background. Copies refer to the same save. Thread-safe.
//
// When the last copy, and the session that made the save, are gone, the last of them waits until
// the save has ended. In a child process of fork() the save still belongs to the parent: functions
// throw Error(kUnsupported), and the destructor does nothing.
class AsyncSave {
 public:
  explicit AsyncSave(std::shared_ptr<engine::Background> save);

  const std::string& save_id() const;  // "" if the save was skipped, or failed before it began
  uint64_t bytes() const;              // elements of the tensors that this rank writes, bytes
  bool skipped() const;                // AsyncOptions::InFlight::kSkip

  // The state may change. It has ended when the call returns.
  const Pending& staged() const;
  // The checkpoint exists and is durable, or the save has failed. Fails with kTimeout soon after
  // the save's timeout, which counts from the call, even if the storage hangs.
  const Pending& durable() const;
  // Waits for durable(), then returns what the save did or throws its error.
  // Error(kTimeout) if it has not ended after `timeout` seconds; the save goes on.
  SaveResult result(double timeout = kNoTimeout) const;
  SaveResult result(Deadline deadline, double timeout) const;

  // Whether nothing of the save runs any more: its small files are removed, too.
  bool finished() const;
  // Asks the save to end: soon durable() fails with kInterrupted here, and likewise, with this
  // rank's number, on the other ranks. No effect once the checkpoint is being published. Does not
  // wait.
  void abandon() const;

 private:
  friend struct engine::OfAsyncSave;
  std::shared_ptr<engine::Background> save_;
};

// Every rank calls. `state` may be destroyed or changed when this returns. options.timeout covers
// all until the checkpoint is durable; options.interrupt ends the call, but not what follows it
// (AsyncSave::abandon). Throws what save() throws for failures before anything is written, and
// errors of staging; later ones are thrown by AsyncSave::result(). Without a session, staging
// memory is new each time: use Session::async_save in a training loop.
AsyncSave async_save(const StateDict& state, const Location& location,
                     const SaveOptions& options = {}, const AsyncOptions& async = {});

}  // namespace tilestone
