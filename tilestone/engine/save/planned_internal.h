// A rank's share of a save once the ranks have agreed who writes what, and what a rank does with it
// alone: it stages, writes, and withdraws what it has written. No communicator is needed for that,
// so any thread may do it.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/deadline.h"
#include "tilestone/base/thread_pool.h"
#include "tilestone/engine/commit/transaction_internal.h"
#include "tilestone/engine/open/tp_replicas_internal.h"
#include "tilestone/engine/run/kept_resources_internal.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/engine/run/step_times_internal.h"
#include "tilestone/engine/save/lazy_staging_internal.h"
#include "tilestone/engine/save/session_parts_internal.h"
#include "tilestone/engine/save/share_internal.h"
#include "tilestone/engine/write/stage_internal.h"
#include "tilestone/plan/receipt.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

class HostStep;

struct PlannedShare {
  std::shared_ptr<Storage> location;
  SaveShare share;
  SaveResult result;
  // The directory beside the location into which the ranks of a save in a sibling write; "": they
  // write to the location.
  std::string sibling;
  std::shared_ptr<Storage>
      storage;  // where this rank writes; set by open_storage() and write_share()
  std::vector<std::string> written;   // its data files, once they are durable
  std::shared_ptr<LazyStaging> lazy;  // what is still to be staged; null: nothing
  StepTimes steps;                    // that this rank has taken

  // Of a save to a fast tier, which has no transaction; null: of any other.
  std::shared_ptr<HostStep> hosts;
  // Only in the process that commits. Holds the location's lock.
  std::optional<Transaction> transaction;
  uint64_t bytes_of_ranks = 0;  // likewise: of all ranks' data files, once they have reported
  ReplicaNames replicas;        // likewise: additional names for the index
  // Likewise: Dialect::encode_index(). Set by write_share(), while the tensors of the common state
  // still have the memory that the save reads.
  std::optional<Index> of_dialect;
};

// Copies the tensors that the rank writes, including those inside objects, into memory that is
// returned and must outlive the writing. Throws Error(kIo) if there is not enough memory, and
// kTimeout or the interrupt's reason. `lazy`: stages the tensors that it watches; may be null.
std::shared_ptr<StagingMemory> stage_share(PlannedShare& planned, SessionParts* session,
                                           Deadline deadline,
                                           const std::shared_ptr<LazyStaging>& lazy);
// The threads that copy `bytes` together with the calling thread; `option` is Resources::threads.
// They are the session's if `session` is not null. Null if the calling thread alone is faster.
std::shared_ptr<ThreadPool> staging_threads(uint64_t bytes, int option, SessionParts* session);

// Sets `storage`. Throws what sibling_storage() and expect_begun_here() throw.
void open_storage(PlannedShare& planned, const Deadline& deadline);
// Writes what is assigned to the rank, and notes in `planned` where, which files, and how much.
// Also returns only once everything is staged, and throws what LazyStaging throws; if this throws,
// the caller calls LazyStaging::end().
// Throws what write_items() and sibling_storage() throw. `kept`: of a session; null: none.
// `first_file`: see WriteTask.
Receipt write_assigned(PlannedShare& planned, KeptResources* kept, Deadline deadline,
                       int first_file = 0);
// The same as the step "writing", at whose end the receipt says which steps the rank has taken.
Receipt write_share(PlannedShare& planned, KeptResources* kept, Deadline deadline,
                    int first_file = 0);
// Notes the step "planning", which has ended. `preparing`: RequestView::preparing.
void note_planned(PlannedShare& planned, StepTimes::Clock::time_point began, double preparing);
// Notes the step "publishing", with which the save has ended, and says so in the log.
void note_published(PlannedShare& planned, StepTimes::Clock::time_point began, SaveResult& result);
// Forgets the tensors, which are not read again once the data is durable.
void release_tensors(SaveShare& share);

// What the process that commits knows of the save, with the receipts of all ranks.
SaveToIndex save_to_index(PlannedShare& planned, std::vector<Receipt> receipts,
                          std::span<const Bytes> encoded);
// Transaction::prepare() with the receipts of all ranks. encoded[r] is receipts[r].encode().
void prepare_commit(PlannedShare& planned, std::vector<Receipt> receipts,
                    std::span<const Bytes> encoded, Deadline deadline);
// The save will not be committed. Removes the data files that this rank has written, and abandons
// the transaction, but does nothing once publishing was tried. `none_writes`: no other rank writes
// any more. Failures are logged.
void discard(PlannedShare& planned, bool none_writes = false) noexcept;

}  // namespace tilestone::engine
