// Session: what a training run keeps from one save to the next. Saves and loads give the same
// results with a session as without.
//
//  - Threads, buffers, and staging memory. Memory that is touched for the first time costs several
//    times as much as copying to it.
//  - Plans. With a communicator, a rank that saves the same structure as before says so instead of
//    sending its plan. If all ranks do, no new plan is made. If any rank has a changed key, shape,
//    dtype, box, replica or object, all ranks send their plans. By files, where a rank plans
//    alone, it makes a new plan only if its own state has changed.
//  - The token, and the number of saves to each location. Together they identify a save by files
//    (ByFiles).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "tilestone/base/deadline.h"
#include "tilestone/base/error.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/engine/load/load.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/engine/save/async_save.h"
#include "tilestone/engine/save/save.h"
#include "tilestone/state/state_dict.h"

namespace tilestone {

namespace engine {
struct OfSession;
}  // namespace engine

// One rank's session. Used by one thread at a time. If an
// asynchronous save is in flight whose handle is gone, the destructor waits for it. With a
// communicator, all ranks construct the session together and make their calls together.
class Session {
 public:
  // With a communicator. Rank 0 makes the token and sends it to all ranks; saves by files need no
  // other message. `timeout` is the time limit for this, in seconds, as SaveOptions::timeout.
  // Throws what a round throws; throws kInvalidArgument on all ranks if `timeout` is invalid on
  // one.
  explicit Session(const Communicator& comm = {}, double timeout = kDefaultTimeout);
  // Without a communicator: every save is by files. Throws what a save with such ByFiles throws.
  Session(int rank, int world_size, std::string token);
  ~Session();
  Session(Session&& other) noexcept;
  Session& operator=(Session&& other) noexcept;

  int rank() const;
  int world_size() const;
  const std::string& token() const;

  // These do the same as the functions of the same names. options.comm is ignored.
  // options.by_files, if set, is used unchanged (see by_files()); a session without a communicator
  // sets it if it is not set.
  SaveResult save(const StateDict& state, const Location& location,
                  const SaveOptions& options = {});
  // One asynchronous save of a session is in flight at a time: see AsyncOptions::in_flight. The
  // session's other saves wait for it, and throw or log its failure if nobody has asked for its
  // result.
  AsyncSave async_save(const StateDict& state, const Location& location,
                       const SaveOptions& options = {}, const AsyncOptions& async = {});
  StateDict load(Wanted wanted, const Location& location, const LoadOptions& options = {});

  // Returns the ByFiles for this session's next save to this location, and counts the save. Ranks
  // that have called this equally often for a location, whatever they save elsewhere, refer to the
  // same save. A failed save counts as well.
  ByFiles by_files(const Location& location);

  // Prepares the memory into which async_save() copies such a state, so that the first save
  // takes no longer than later ones. Returns its size in bytes: what this rank wrote when it last
  // saved a state of this structure, else what it would write by rule; without the tensors that
  // async.max_staged_bytes excludes. Each rank may call this on its own.
  uint64_t prepare(const StateDict& state, const SaveOptions& options = {},
                   const AsyncOptions& async = {});

  SessionStats stats() const;

 private:
  friend struct engine::OfSession;
  struct Kept;
  Session(const Communicator& comm, Deadline deadline, const std::optional<Error>& failed);
  explicit Session(std::unique_ptr<Kept> kept);
  SaveOptions completed(const SaveOptions& options, const Location& location);
  void report_earlier(AsyncOptions::InFlight policy, const SaveOptions& options,
                      const Deadline& deadline);
  std::unique_ptr<Kept> kept_;
};

}  // namespace tilestone
