// What the steps of the protocol share; only the files attempt*.cc include it.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/engine/commit/attempt_internal.h"
#include "tilestone/engine/commit/describe_internal.h"
#include "tilestone/format/index.h"
#include "tilestone/plan/receipt.h"

namespace tilestone::engine {

// ---- How it has ended (attempt.cc)

// Throws what it has failed with, if it was not abandoned.
[[noreturn]] void fail_abandoned(const Attempt& attempt);
// Another save's switch was published first and gc has removed this save's files, or a later save
// has replaced the checkpoint.
[[noreturn]] void fail_no_checkpoint(const Attempt& attempt);
// Whether the outcome is "published". Throws if it is "abandoned".
bool outcome_is_published(const Attempt& attempt);
// Whether the switch was published.
bool switch_is_published(const Attempt& attempt);
// Whether nothing is left to do. Does step 6 if the publisher died before it. Throws if the attempt
// was abandoned.
bool is_finished(const Attempt& attempt);
// Whether an error of this code, thrown while an attempt is published, is permanent: the cause is
// what the ranks have left, or another checkpoint that was published first. Then no process can
// publish the attempt.
bool prevents_publishing(ErrorCode code);
// What `step` returns. An error that prevents publishing ends the attempt. Not to be used where
// data files are looked for: a file server may show one later, and then the attempt can be
// published.
template <typename Step>
auto check_or_end(const Attempt& attempt, const Step& step) {
  try {
    return step();
  } catch (const Error& error) {
    if (prevents_publishing(error.code())) end_failed(attempt, error, Deadline::never());
    throw;
  }
}
// Whether files of the attempt are gone because it was published: just now, or earlier with step 6
// interrupted.
bool was_published(const Attempt& attempt);
void clean(const Attempt& attempt);  // step 6

// What `step` returns. If it throws because another process has published the attempt meanwhile,
// and removed the files that it was reading: true.
template <typename Step>
bool unless_published(const Attempt& attempt, const Step& step) {
  try {
    return step();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kAlreadyExists && switch_is_published(attempt)) return true;
    throw;
  }
}

// ---- Step 3 (attempt_merge.cc)

// Called before a complete group is merged, with the receipts of its ranks.
using BeforeMerging = void (*)(const Attempt& attempt, std::vector<Receipt> receipts,
                               Deadline deadline);
// Merges the groups that are complete. Returns whether all are. kAgain: as kAll.
bool merge_groups(const Attempt& attempt, Look look, BeforeMerging before, int threads,
                  Deadline deadline);

// What all ranks have left, by rank.
struct AllLeft {
  std::vector<AttemptReceipt> left;  // without AttemptReceipt::receipt
  std::vector<Receipt> receipts;
  std::vector<Bytes> encoded;  // encoded[i] is the result of receipts[i].encode()
};
// Once all groups are merged. nullopt: they were published and removed since.
std::optional<AllLeft> read_merged(const Attempt& attempt);
// The files that describe the checkpoint. `remains`: as SaveToIndex::remains.
NewIndex describe_left(const Attempt& attempt, AllLeft all, std::set<std::string> remains);
// The ordinary save's checks, then the files. Errors: those of receipts that contradict each other.
NewIndex describe_checked(const Attempt& attempt, AllLeft all);

// ---- What the ranks hold (attempt_contents.cc)

void expect_same_lists(const Attempt& attempt, const AllLeft& all);
void expect_same_keys(const AllLeft& all);
void expect_all_objects(const AllLeft& all);
void expect_same_contents(const Attempt& attempt, const AllLeft& all);
void expect_declared(const AllLeft& all);
// As checks.common_differs says: throws, logs, or does nothing.
void report_differing(const Attempt& attempt, const std::string& what, int rank);

// ---- Steps 4 and 5 (attempt_publish.cc)

// Refuses if one of these ranks has metadata here, of another save or copied: beside an ordinary
// index it would be ambiguous.
void refuse_rank_metadata(const Attempt& attempt, int begin, int end);
// kAgain: throws what expect_files() throws, unless a later save may have removed the files.
void expect_files_again(const Attempt& attempt, const AllLeft& all, Look look, int threads,
                        Deadline deadline);
void publish_manifest(const Attempt& attempt, const Bytes& manifest, Deadline deadline);
// Makes the outcome, and publishes the index.
void publish_index(const Attempt& attempt, const Index& index, Deadline deadline);
// Accepts a file that exists, and syncs its directory: the process that made it may have died
// before it was durable. Returns whether this call made it.
bool publish_unless_there(const Attempt& attempt, const std::string& name,
                          const std::string& temp_name, ByteView bytes, Deadline deadline);
// False: a file with other bytes has this name.
bool publish_or_find(const Attempt& attempt, const IndexFile& file, Deadline deadline);
Index files_of_dialect(const Attempt& attempt, AttemptReceipt& of_rank_0);
void publish_files(const Attempt& attempt, const Index& index, Deadline deadline);
[[noreturn]] void fail_not_first(const Attempt& attempt, const std::string& file);
// Another save may have become the checkpoint while this one waited for its ranks.
void expect_first(const Attempt& attempt);

// ---- Waiting (attempt_wait.cc)

// Waits until the attempt is published, or all groups are merged and `merged_is_enough`. `finish`:
// takes over from a publisher that has died, and returns whether that has completed the save.
using Finish = bool (*)(const Attempt& attempt, Look look, int threads, Deadline deadline);
void wait_complete(const Attempt& attempt, bool merged_is_enough, Finish finish, int threads,
                   Deadline deadline);

}  // namespace tilestone::engine
