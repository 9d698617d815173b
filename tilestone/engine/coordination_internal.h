// The interface between the steps of a save and the way its ranks coordinate: by a communicator's
// rounds (save.cc) or by files that the ranks leave at the location (save_by_files.cc).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "tilestone/base/deadline.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/run/location.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/engine/save.h"
#include "tilestone/engine/save_share_internal.h"
#include "tilestone/plan/report.h"
#include "tilestone/state/state_dict.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

struct SessionParts;

// What a rank saves, where and how. Borrowed from the caller, and used only during planning.
struct Brought {
  const StateDict* state = nullptr;
  const Location* location = nullptr;
  const SaveOptions* options = nullptr;
  const StateDict* compared = nullptr;  // SaveRequest::compared_common; null: not given
};
using Bring = std::function<Brought()>;
// A Bring that makes the request when it is called, and then owns it: it brings what `prepare`
// returns. Refers to `prepare` until then.
Bring bring_request(const std::function<SaveRequest()>& prepare);

// Where a rank writes its share.
struct WritePlace {
  Storage* storage = nullptr;
  int first_file = 0;  // see WriteTask::first_file
  Deadline deadline = Deadline::never();
};
using WriteShare = std::function<RankReport(const WritePlace&)>;

// One rank's part in coordinating one save. The functions are called in this order, each once, by
// one thread at a time. A function that throws has already cleaned up, and nothing may be called
// after it.
class Coordination {
 public:
  virtual ~Coordination() = default;

  // Decides who writes what, and begins the save at the location. share() is complete afterwards.
  virtual void plan(const Bring& bring) = 0;
  // Calls `write` if this rank has something to write. If `write` throws, the error is kept and
  // report() throws it, because report() is how the other ranks learn of it. Only the interrupt of
  // a call is thrown at once.
  virtual void write(const WriteShare& write) = 0;
  // Reports to the other ranks what this rank has written.
  virtual void report() = 0;
  virtual SaveResult publish() = 0;

  // Called instead of the next step if this rank leaves the save. Tells the other ranks why, if
  // they still need this rank, and removes the files that this rank has written but not reported.
  virtual void give_up(const Error& why) noexcept = 0;

  SaveShare& share() { return share_; }
  Deadline deadline() const { return deadline_; }
  SessionParts* session() const { return session_.get(); }  // null: no session

 protected:
  Coordination(Deadline deadline, std::shared_ptr<SessionParts> session)
      : deadline_(std::move(deadline)), session_(std::move(session)) {}

  SaveShare share_;
  const Deadline deadline_;
  const std::shared_ptr<SessionParts> session_;
};

// Coordinates by a communicator's rounds. `place`: as for save(). Begins the call and throws what
// Call throws. `session`: the session that makes the save; null: none.
std::unique_ptr<Coordination> coordinate_by_rounds(const Communicator& comm,
                                                   const std::string& place, Deadline deadline,
                                                   std::shared_ptr<SessionParts> session = nullptr);
// Coordinates by files, as options.by_files says. Throws Error(kInvalidArgument) if the other
// options contradict by_files or if its rank is invalid. All other checks of the options wait until
// the other ranks can learn of a failure. `session`: as above.
std::unique_ptr<Coordination> coordinate_by_files(const Location& location,
                                                  const SaveOptions& options, Deadline deadline,
                                                  std::shared_ptr<SessionParts> session = nullptr);
// Coordinates as the options say: by files, or by rounds of options.comm.
std::unique_ptr<Coordination> coordinate(const Location& location, const SaveOptions& options,
                                         Deadline deadline,
                                         std::shared_ptr<SessionParts> session = nullptr);
// Throws Error(kUnsupported) if the share's options ask for something that can't be saved by files.
// Depends only on the options, so it throws on all ranks or on none.
void refuse_by_files(const SaveShare& share);

}  // namespace tilestone::engine
