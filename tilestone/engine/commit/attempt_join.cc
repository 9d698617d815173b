// Step 1 of the protocol in attempt.cc: a rank begins the attempt, or joins it.
#include <string>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/commit/attempt_internal.h"
#include "tilestone/engine/commit/attempt_parts_internal.h"
#include "tilestone/engine/commit/staging_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/detect_internal.h"
#include "tilestone/engine/open/message_files_internal.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/engine/run/terms_internal.h"
#include "tilestone/format/foreign.h"
#include "tilestone/storage/directories.h"

namespace tilestone::engine {
namespace {

// A rank-local attempt must be the only open one. Ordinary ones may be open side by side. A damaged
// head does not prevent this save: if its ranks have published metadata, refuse_rank_metadata()
// finds that before the switch.
bool may_be_open_beside(const Attempt& attempt, const std::string& save_id) {
  if (attempt.head.rank_local) return false;
  try {
    const auto head = read_head(*attempt.location, save_id);
    return !head || !head->rank_local;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kCorrupt) throw;
    return true;
  }
}

void refuse_other_attempts(const Attempt& attempt) {
  Storage& storage = *attempt.location;
  const std::vector<std::string> names = storage.list(std::string(kTilestoneDirectory) + "/");
  for (const std::string& other : read_notes(storage, names).open(false)) {
    if (other == attempt.id() || may_be_open_beside(attempt, other)) continue;
    throw Error(ErrorCode::kAlreadyExists, "the save " + other + " at " + storage.describe() +
                                               ", without a communicator, is not published yet")
        .with_file(attempt_name(other))
        .with_hint(
            "save elsewhere, or end that save: `tilestone publish`, or `tilestone gc "
            "--abandon` if its ranks are dead");
  }
}

// Where files of the index have fixed names (attempt_publish.cc). `names`: all at the location.
void refuse_fixed_names(const Attempt& attempt, const std::vector<std::string>& names) {
  Storage& storage = *attempt.location;
  const auto first = attempt.format->detect(names) ? partly_published_by(storage) : std::nullopt;
  if (first) {
    throw Error(ErrorCode::kAlreadyExists,
                "the save " + *first + " is being published at " + storage.describe())
        .with_hint("`tilestone publish` completes it if nobody does; save elsewhere");
  }
  if (!attempt.dialect->has_fixed_names()) return;
  for (const std::string& name : attempt.dialect->index_files(names)) {
    throw Error(ErrorCode::kAlreadyExists,
                "a file with a name that this save needs exists at " + storage.describe())
        .with_file(name)
        .with_hint("save elsewhere, or move the file: a failed save may have left it");
  }
}

bool is_claimed(Storage& storage) {
  try {
    return storage.is_claimed(std::string(kLockName));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
    return false;
  }
}

void refuse_existing(const Attempt& attempt) {
  Storage& storage = *attempt.location;
  const auto refuse = [&](const std::string& what, const std::string& hint,
                          const std::string& more = "") {
    throw Error(ErrorCode::kAlreadyExists, what + " " + storage.describe() + more).with_hint(hint);
  };
  const std::vector<std::string> names = storage.list();
  if (contains_name(names, kRemovedName)) {
    refuse("a removal is under way at", "`tilestone gc` ends it if nobody does; save elsewhere");
  }
  const auto other = find_foreign(
      names, [&](const std::string& name) { return read_file(storage, name, UINT64_MAX); });
  if (other || any_checkpoint(storage, *attempt.format)) {
    refuse("a checkpoint exists at",
           "a save without a communicator can't replace a checkpoint: save elsewhere");
  }
  refuse_fixed_names(attempt, names);
  if (is_claimed(storage)) {
    refuse("a save with a communicator is under way at", "save elsewhere", lock_holder(storage));
  }
}

void expect_same_head(const Attempt& attempt, const AttemptHead& other) {
  const AttemptHead& head = attempt.head;
  if (other == head) return;
  const auto differ = [&](const std::string& what, const std::string& here,
                          const std::string& there) {
    if (here == there) return;
    throw Error(ErrorCode::kMismatch, "the ranks of a save don't agree on " + what + ": " + here +
                                          " here, " + there + " on the rank that began the save")
        .with_file(attempt_name(head.save_id))
        .with_hint("use one token per run of a job, and the same options on all its ranks");
  };
  differ("world_size", std::to_string(head.world_size), std::to_string(other.world_size));
  differ("format", head.format, other.format);
  differ("dialect", head.dialect, other.dialect);
  differ("the version", head.writer, other.writer);
  differ("torch_rank_local", head.rank_local ? "true" : "false",
         other.rank_local ? "true" : "false");
  const auto differing = [](const AttemptHead& of) {
    return differing_text(static_cast<Checks::Differing>(of.common_differs));
  };
  differ("checks.common_differs", differing(head), differing(other));
  differ("attributes", attributes_text(head.attributes), attributes_text(other.attributes));
  differ("the token", std::to_string(head.token), std::to_string(other.token));
  differ("number", std::to_string(head.number), std::to_string(other.number));
}

// Syncs the head, because the rank that made it may have died before it was durable.
void join_begun(const Attempt& attempt, const AttemptHead& begun) {
  expect_same_head(attempt, begun);
  attempt.location->settle(std::string(kTilestoneDirectory));
  attempt.location->settle("");
}

void refuse_others(const Attempt& attempt) {
  refuse_other_attempts(attempt);
  refuse_existing(attempt);
}

// Once the head exists: another save may have begun at the same time. It may happen that neither of
// the two continues. Other ranks of a rank-local save may have published their metadata meanwhile,
// and with an outcome, the other ranks have completed the save: what is there may be this save's.
void expect_still_free(const Attempt& attempt) {
  try {
    attempt.head.rank_local ? refuse_other_attempts(attempt) : refuse_others(attempt);
  } catch (const Error&) {
    if (!read_outcome(*attempt.location, attempt.id())) throw;
  }
}

void begin(const Attempt& attempt, Deadline deadline) {
  Storage& storage = *attempt.location;
  try {
    refuse_others(attempt);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kAlreadyExists) throw;
    // If another rank has begun the attempt meanwhile, the refused files may be that rank's
    // metadata.
    const auto begun = read_head(storage, attempt.id());
    if (!begun) throw;
    return join_begun(attempt, *begun);
  }
  // Also where it was there before, and has gone.
  if (Directories* const directories = storage.directories()) directories->make("");
  DurableMessages messages(attempt.location, attempt.id());
  bool is_first = false;  // or may be
  const Bytes counts = decide(messages, kHeadMessage, attempt.head.encode(), deadline, &is_first);
  if (!storage.facts().put_if_absent) {  // the put has shown it
    storage.remove(attempt_name(attempt.id()));
    throw Error(ErrorCode::kUnsupported, "ranks can't save by files to " + storage.describe() +
                                             ": the store has no conditional writes")
        .with_hint("save with a communicator");
  }
  storage.settle("");
  expect_same_head(attempt, AttemptHead::decode(counts, attempt_name(attempt.id())));
  if (is_first) expect_still_free(attempt);
}

}  // namespace

bool join(const Attempt& attempt, Deadline deadline) {
  if (is_finished(attempt)) return false;
  if (const auto begun = read_head(*attempt.location, attempt.id())) {
    join_begun(attempt, *begun);
    return true;
  }
  // While this rank stalls here, a second run of it and the other ranks may have completed the
  // save.
  try {
    begin(attempt, deadline);
  } catch (const Error&) {
    if (is_finished(attempt)) return false;
    throw;
  }
  return !is_finished(attempt);
}

}  // namespace tilestone::engine
