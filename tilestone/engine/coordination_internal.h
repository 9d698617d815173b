// The seam between the steps of a save and the way in which its ranks know of one another: by a
// communicator's rounds (save.cc) or by files that they leave (save_by_files.cc).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "tilestone/base/deadline.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/run/location.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/plan/report.h"
#include "tilestone/plan/save_plan.h"
#include "tilestone/state/items.h"
#include "tilestone/state/state_dict.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

struct SessionParts;

// What a rank saves, where and how; owned by whoever brings it, and looked at while it plans.
struct Brought {
  const StateDict* state = nullptr;
  const Location* location = nullptr;
  const SaveOptions* options = nullptr;
  const StateDict* compared = nullptr;  // as SaveRequest::compared_common; null: not given
};
using Bring = std::function<Brought()>;

// A rank's part of a save once it is planned. The memory of tensors is the caller's as long as
// nothing is staged; all else is owned.
struct SaveShare {
  SaveOptions options;
  std::shared_ptr<const Format> format;
  std::shared_ptr<const Dialect> dialect;
  Items items;
  LocalSavePlan local;
  Assignment assignment;     // of the local plan: what this rank writes
  bool report_held = false;  // as WriteTask::report_held
  int rank = 0;
  int world_size = 1;
  std::string save_id;

  uint64_t bytes() const;  // of the assigned tensors' elements, copies among them
};

// Where a share goes.
struct WritePlace {
  Storage* storage = nullptr;
  int first_file = 0;  // as WriteTask::first_file
  Deadline deadline = Deadline::never();
};
using WriteShare = std::function<RankReport(const WritePlace&)>;

// One rank's part in one save. The functions are called in this order, each once, by one thread at
// a time. One that throws has cleaned up after itself, and nothing is called after it.
class Coordination {
 public:
  virtual ~Coordination() = default;

  // Agrees on who writes what, and begins the save at the location; share() is complete then.
  virtual void plan(const Bring& bring) = 0;
  // Calls `write` where this rank has something to write. What that throws is kept for report(),
  // which is how the other ranks learn of it; an interrupt of a call comes out at once.
  virtual void write(const WriteShare& write) = 0;
  // Tells the other ranks what this one has written.
  virtual void report() = 0;
  virtual SaveResult publish() = 0;

  // Instead of the next step: this rank leaves the save. The others learn why, where they still
  // need it, and what this rank has written and not reported goes.
  virtual void give_up(const Error& why) noexcept = 0;

  SaveShare& share() { return share_; }
  virtual Deadline deadline() const = 0;

 protected:
  SaveShare share_;
};

// `place`: as for save(). Begins the call: throws what Call throws. `session`, which may be null,
// has this rank's plans of earlier saves.
std::unique_ptr<Coordination> coordinate_by_rounds(const Communicator& comm,
                                                   const std::string& place, Deadline deadline,
                                                   std::shared_ptr<SessionParts> session = nullptr);
// By options.by_files. Error(kInvalidArgument) where they contradict it or say of no rank; other
// options are checked once the others can hear of it. `session`: likewise.
std::unique_ptr<Coordination> coordinate_by_files(const Location& location,
                                                  const SaveOptions& options, Deadline deadline,
                                                  std::shared_ptr<SessionParts> session = nullptr);
// Error(kUnsupported) for what can't be saved by files, as the options alone say: on all ranks.
void refuse_by_files(const SaveOptions& options, const Format& format, const Dialect& dialect);

// What a rank writes in torch's rank-local mode: all that it holds, but for boxes without elements
// of tensors that have some.
Assignment all_that_is_held(const LocalSavePlan& plan);

// What copies of a save by files would cost this rank; nothing is written.
CopyCost copies_by_files(const Location& location, const SaveOptions& options, Deadline deadline,
                         const Bring& bring);

// All steps in a row.
SaveResult save_in_a_row(std::unique_ptr<Coordination> coordination, const Bring& bring);

}  // namespace tilestone::engine
