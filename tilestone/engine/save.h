#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/engine/run/location.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/state/state_dict.h"

namespace tilestone {

// Saves the state that the ranks of options.comm hold together; every rank calls. On return the
// checkpoint is complete and durable. On failure every rank throws the same Error, which names
// the rank that failed, before the timeout; what stood at the location still stands, and nothing
// half-done can be taken for a checkpoint.
//
// Protocol (crash argument in commit.cc):
// Where names of files say nothing of their save, all of it happens in a directory beside the
// location, and the index is published in there; the switch of step 3 is then the rename of that
// directory to the location, or its exchange with what stands there.
//  1. Each rank: factories, non-persistent dropped, items, local plan. Gathered to the
//     coordinator, which checks that location and options are the same on all ranks, plans, locks
//     the location, refuses or accepts what stands there, and scatters each rank its own assignment
//     with the save id.
//  2. Each rank writes new data files, makes them and their directory entries durable, and reports.
//  3. The coordinator merges the reports (coverage is checked here), opens every file that a rank
//     reported, publishes the manifest, then the format's metadata by one rename: the checkpoint
//     exists. Every rank gets the result.
//  4. The coordinator removes the files of the checkpoint that was replaced, and those of earlier
//     failed attempts.
SaveResult save(const StateDict& state, const Location& location, const SaveOptions& options = {});

// What SaveOptions::replicate would cost the same save(), by rank; nothing is written. Every rank
// calls; by files (options.by_files) each calls for itself, and the only element is its own cost.
// Errors: those of a save's planning.
std::vector<CopyCost> plan_copies(const StateDict& state, const Location& location,
                                  const SaveOptions& options);

// What a rank brings to a save.
struct SaveRequest {
  StateDict state;
  Location location;
  SaveOptions options;  // its comm is not looked at
  // Where given, the common state of this one is compared with the other ranks' in place of that of
  // `state`, which is saved (SaveOptions::common_differs).
  std::optional<StateDict> compared_common = std::nullopt;
};

// The same for a rank whose request may fail to be made: `prepare` runs inside the first round, and
// what it throws is this rank's failure, which every rank throws. The save ends by `deadline`.
// `place`: the location's place(), by which ranks know that they are in the same call.
SaveResult save(const std::function<SaveRequest()>& prepare, const std::string& place,
                const Communicator& comm, Deadline deadline);

// A rank's save without a communicator: options.by_files is set, and nothing else of the request
// waits for other ranks (SaveRequest::compared_common is not looked at). The protocol, with what
// each race comes to, stands in commit/attempt.cc. Errors are this rank's own, or what another rank
// has left as its failure; kTimeout names ranks that have not written when the deadline passes, and
// what was written stays for them to complete. save() with options.by_files is the same.
// `location` and `options` are the request's, but for what only its rank uses (tensor_attributes,
// progress): where `prepare` throws, the ranks of this save that wait hear of it by them.
SaveResult save_by_files(const Location& location, const SaveOptions& options,
                         const std::function<SaveRequest()>& prepare, Deadline deadline);

// plan_copies() in the same two ways. By files the rank's own cost, and nobody else hears of what
// `prepare` throws.
std::vector<CopyCost> plan_copies(const std::function<SaveRequest()>& prepare,
                                  const std::string& place, const Communicator& comm,
                                  Deadline deadline);
CopyCost plan_copies_by_files(const Location& location, const SaveOptions& options,
                              const std::function<SaveRequest()>& prepare, Deadline deadline);

}  // namespace tilestone
