// A save whose ranks meet only in files that they leave at the location. commit/attempt.cc
// describes and numbers the steps of the protocol. Plan, write, report and publish, in this order;
// a function that throws has ended the save on this rank, and has cleaned up.
#pragma once

#include <exception>
#include <optional>

#include "tilestone/base/deadline.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/commit/attempt_internal.h"
#include "tilestone/engine/run/kept_resources_internal.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/engine/save/planned_internal.h"
#include "tilestone/engine/save/request_internal.h"
#include "tilestone/engine/save/session_parts_internal.h"
#include "tilestone/engine/save/share_internal.h"
#include "tilestone/format/index.h"
#include "tilestone/plan/receipt.h"

namespace tilestone::engine {

// One rank's part, from step to step.
struct SavingByFiles {
  // As options.by_files says. Throws Error(kInvalidArgument) if the other options contradict
  // by_files or if its rank is invalid. All other checks of the options wait until the other ranks
  // can learn of a failure.
  SavingByFiles(const Location& location, const SaveOptions& options, Deadline deadline);

  ByFiles files;
  Deadline deadline;
  PlannedShare planned;
  Attempt attempt;
  bool is_done = false;            // already published: this rank has nothing to do
  bool is_reported = false;        // by this process, or before a restart
  std::optional<WorkClaim> claim;  // shows that this rank works
  std::optional<Receipt> receipt;  // of what this process has written
  Index of_dialect = {};           // on rank 0: the dialect's files
  std::exception_ptr failed;       // in writing; the save has ended for all ranks
};

// Plans by rule, and joins the attempt. The session, as in saves by rounds, is not used.
void plan_step(SavingByFiles& saving, const MadeRequest& request, SessionParts* session);
// Writes this rank's share, if it has one. A failure ends the save and is kept: report_step()
// throws it.
void write_step(SavingByFiles& saving, KeptResources* kept) noexcept;
void report_step(SavingByFiles& saving);
SaveResult publish_step(SavingByFiles& saving);
// To be called instead of the next step. If this rank has reported, does nothing: the other ranks
// can complete the save.
void give_up_save(SavingByFiles& saving, const Error& why) noexcept;

// Throws Error(kUnsupported) if the share's options ask for something that can't be saved by files.
// Depends only on the options, so it throws on all ranks or on none.
void refuse_by_files(const SaveShare& share);

}  // namespace tilestone::engine
