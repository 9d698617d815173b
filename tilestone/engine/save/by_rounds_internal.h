// A save whose ranks meet in the rounds of a communicator, in one call: plan, write, report and
// publish, in this order. A function that throws has ended the save on this rank, and has removed
// what the rank has written. Between the steps nothing is hidden in `rounds` but the call itself:
// whoever has planned can also write, let the ranks report and commit in another way.
#pragma once

#include <optional>
#include <string>
#include <variant>

#include "tilestone/base/deadline.h"
#include "tilestone/base/error.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/engine/run/kept_resources_internal.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/engine/run/rounds_internal.h"
#include "tilestone/engine/run/terms_internal.h"
#include "tilestone/engine/save/planned_internal.h"
#include "tilestone/engine/save/request_internal.h"
#include "tilestone/engine/save/session_parts_internal.h"
#include "tilestone/plan/receipt.h"

namespace tilestone::engine {

// What a rank has written, or why it has not.
using Written = std::variant<Receipt, Error>;

// One rank's part, from step to step.
struct SavingByRounds {
  // Begins the call `name`; throws what Call throws. `location`: Location::identity_or_empty().
  SavingByRounds(const Communicator& comm, const std::string& name, const std::string& location,
                 Deadline deadline);

  Rounds rounds;
  PlannedShare planned;
  std::optional<Written> written;
  bool publishes = true;  // false: there is no transaction, and the location stays as it is
};

// Decides who writes what, and begins the save at the location. `session`: null without one.
// `more_terms`: what must be equal on all ranks beside the request's options.
void plan_step(SavingByRounds& saving, const MadeRequest& request, SessionParts* session,
               const Terms& more_terms = {});
// Writes this rank's share. A failure is kept, because the other ranks learn of it when this rank
// reports. Throws only an interrupt's reason, which the others learn at once.
void write_step(SavingByRounds& saving, KeptResources* kept);
// Reports to the other ranks. On the coordinator, makes everything durable but the switch.
void report_step(SavingByRounds& saving);
// The checkpoint exists when this returns.
SaveResult publish_step(SavingByRounds& saving);
// To be called instead of the next step: this rank leaves the save, and the others learn why.
void give_up_save(SavingByRounds& saving, const Error& why) noexcept;

}  // namespace tilestone::engine
