// Steps 3 to 5 of the protocol in attempt.cc: receipts are merged, the outcome is made, and the
// index published.
//
// In a dialect whose index has files with fixed names (Megatron-Core's, with common.pt and
// metadata.json beside .metadata) no single step publishes them, and two attempts would use the
// same names. There a rank does not join where one of these files exists, and rank 0's receipt
// contains the dialect's files, so that all publishers make the same bytes. In step 5 they publish
// the index file by file; an existing file with the same bytes is this save's:
//
//  a. Check that none of the later files exists with other bytes.
//  b. Publish .metadata. It names the save, so it decides which attempt is first, also where one is
//     in PyTorch's dialect: who finds another save's has changed nothing, and ends with
//     kAlreadyExists. Then publish common.pt. Once .metadata exists, no deadline ends the call.
//  c. Publish metadata.json, the switch.
//
// Between b and c the save is unpublished: our readers do not accept it as a checkpoint
// (partly_published_by() in open/detect.cc), and Megatron-Core's do not without a metadata.json.
// Stock torch, which reads .metadata alone, finds a complete checkpoint: all files that it names
// are durable, and no other save can become the checkpoint any more.
//
// Two publishers write the same bytes, so each goes on where the other is. If one dies after b, a
// process that waits or publishes makes the missing files; meanwhile no other save begins, because
// the attempt is open, and abandon() refuses. The losing attempt's files are leftovers once the
// checkpoint exists. A crash before b is one of attempt.cc; from b on each file is durable before
// the next one is made, and the next publisher begins with a.
#include <algorithm>
#include <chrono>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/base/pause.h"
#include "tilestone/base/size_text.h"
#include "tilestone/base/thread_pool.h"
#include "tilestone/engine/commit/attempt_internal.h"
#include "tilestone/engine/commit/describe_internal.h"
#include "tilestone/engine/commit/presence_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/description_internal.h"
#include "tilestone/engine/open/detect_internal.h"
#include "tilestone/engine/open/rank_local_internal.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/engine/run/resources_internal.h"
#include "tilestone/engine/run/terms_internal.h"
#include "tilestone/format/manifest.h"

namespace tilestone::engine {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr int kMostClaimedLooks = 10;
constexpr Seconds kTakeOver{3};      // wait before looking for a publisher; plus a random time
constexpr double kManyRanks = 4096;  // in a larger world each rank looks less often

// ---- Errors

// Whether an error of this code, thrown while an attempt is published, is permanent: the cause is
// what the ranks have left, or another checkpoint that was published first. Then no process can
// publish the attempt.
bool prevents_publishing(ErrorCode code) {
  return code == ErrorCode::kMismatch || code == ErrorCode::kCoverage ||
         code == ErrorCode::kInvalidArgument || code == ErrorCode::kCorrupt ||
         code == ErrorCode::kAlreadyExists;
}

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

[[noreturn]] void fail_not_first(const Attempt& attempt, const std::string& file) {
  const auto first = partly_published_by(*attempt.location);
  const std::string at = attempt.location->describe();
  Error error(
      ErrorCode::kAlreadyExists,
      first ? "the save " + *first + " came before the save " + attempt.id() + " at " + at +
                  ", and is being published"
            : "another checkpoint was published at " + at + " before the save " + attempt.id());
  if (first) {
    error.with_hint(
        "`tilestone publish` completes that save if nobody does; then `tilestone gc` removes the "
        "files of this one");
  }
  throw std::move(error).with_file(file);
}

// Another save may have become the checkpoint while this one waited for its ranks. Looks up one
// name as long as there is no index, because many ranks wait.
void expect_first(const Attempt& attempt) {
  const std::string name = name_of_index(attempt.head);
  if (!attempt.location->stat(name)) return;
  if (attempt.head.rank_local) fail_not_first(attempt, name);
  if (phase_of(attempt) == Phase::kPublished) return;
  std::optional<std::string> first = partly_published_by(*attempt.location);
  if (!first) {
    try {
      const ExistingCheckpoint existing = read_existing(*attempt.location, attempt.format);
      if (existing.found) first = existing.save_id;
    } catch (const Error&) {
      return;  // it is being replaced, or is damaged
    }
  }
  if (first && *first != attempt.id()) fail_not_first(attempt, name);
}

// ---- Receipts

// `messages`: of adjacent ranks from `first` on, the results of AttemptReceipt::encode().
AllLeft decode_left(const Attempt& attempt, const std::vector<Bytes>& messages, int first = 0) {
  AllLeft all;
  for (int rank = first; const Bytes& bytes : messages) {
    const std::string file = attempt.meeting->file_of(rank);
    AttemptReceipt& left = all.left.emplace_back(AttemptReceipt::decode(bytes, file));
    const Receipt& receipt = all.receipts.emplace_back(Receipt::decode(left.receipt));
    if (receipt.rank != rank || receipt.save_id != attempt.id()) {
      throw Error(ErrorCode::kCorrupt, "the file has the receipt of rank " +
                                           std::to_string(receipt.rank) + " of the save " +
                                           receipt.save_id)
          .with_file(file);
    }
    all.encoded.push_back(std::move(left.receipt));
    ++rank;
  }
  return all;
}

// Merges the groups that are complete. Returns whether all are.
bool merge_groups(const Attempt& attempt, int threads, Deadline deadline) {
  return attempt.meeting->is_complete(
      deadline, [&](int first, std::span<const std::optional<Bytes>> messages) {
        std::vector<Bytes> left;
        for (const std::optional<Bytes>& one : messages) left.push_back(*one);
        expect_files(*attempt.location, decode_left(attempt, left, first).receipts, threads,
                     deadline);
      });
}

// Once all groups are merged. nullopt: they were published and removed since.
std::optional<AllLeft> read_merged(const Attempt& attempt) {
  const auto messages = attempt.meeting->take();
  return messages ? std::optional(decode_left(attempt, *messages)) : std::nullopt;
}

// ---- What is published

Index files_of_dialect(const Attempt& attempt, AttemptReceipt& of_rank_0) {
  const Dialect& dialect = *attempt.dialect;
  std::vector<std::string> names;
  for (const IndexFile& file : of_rank_0.of_dialect) names.push_back(file.name);
  std::sort(names.begin(), names.end());
  const bool known = dialect.index_files(names) == names;
  if (known && dialect.has_fixed_names() != names.empty()) return std::move(of_rank_0.of_dialect);
  throw Error(ErrorCode::kCorrupt,
              "the receipt of rank 0 lacks the index files of the dialect " + attempt.head.dialect)
      .with_rank(0);
}

// The ordinary save's checks, then the files that describe the checkpoint. Errors: those of
// receipts that contradict each other.
NewIndex describe_checked(const Attempt& attempt, AllLeft all) {
  const AttemptHead& head = attempt.head;
  expect_one_state(attempt, all);
  ReplicaNames replicas;
  for (const AttemptReceipt& one : all.left) merge_replica_names(replicas, one.replicas);
  SaveToIndex save{.receipts = std::move(all.receipts),
                   .encoded = all.encoded,
                   .copies = CopyPolicy::kAccept,
                   .save_id = head.save_id,
                   .writer = head.writer,
                   .attributes = head.attributes,
                   .of_dialect = files_of_dialect(attempt, all.left.front()),
                   .replicas = std::move(replicas)};
  try {
    return describe_save(std::move(save), *attempt.format, *attempt.dialect);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kMismatch && error.key().empty()) expect_declared(all);
    throw;
  }
}

// Of a rank-local save: the metadata of each rank.
NewIndex describe_ranks(const Attempt& attempt, AllLeft all) {
  NewIndex made;
  for (Receipt& receipt : all.receipts) {
    made.index.push_back(describe_rank(std::move(receipt), *attempt.format));
  }
  return made;
}

// ---- Publishing

bool holds(const Attempt& attempt, const std::string& name, ByteView bytes) {
  const auto found = read_if_there(*attempt.location, name);
  return found && std::ranges::equal(*found, bytes);
}

// The attempt's directory may have been made anew by a temporary file.
[[noreturn]] void fail_ended(const Attempt& attempt) {
  attempt.location->remove_tree(attempt_directory(attempt.id()));
  throw Error(ErrorCode::kNotFound, "the save " + attempt.id() + " has ended meanwhile")
      .with_file(attempt_name(attempt.id()));
}

// After this process has made a file without a rename. Others may have published the save before,
// and its checkpoint may have been replaced or removed since. If they did so after this file was
// made, it stands. A file that does not name the save may be that of a later one, and stays.
void expect_not_over(const Attempt& attempt, const std::string& name, ByteView bytes) {
  Storage& storage = *attempt.location;
  if (has_begun(attempt)) return;
  const bool stands = read_outcome(storage, attempt.id()) == Outcome::kStands;
  if (stands && storage.stat(manifest_name(attempt.id()))) return;
  const bool names_save = as_text(bytes).find(attempt.id()) != std::string_view::npos;
  const auto info = storage.stat(name);
  if (info && names_save && holds(attempt, name, bytes)) {
    storage.remove_if(name, info->tag, Deadline::never());
  }
  fail_ended(attempt);
}

// Makes the file, or accepts the one that is there, and syncs its directory: the process that made
// it may have died before it was durable. Returns false if that file has other bytes.
bool publish_or_find(const Attempt& attempt, const std::string& name, ByteView bytes,
                     Deadline deadline) {
  Storage& storage = *attempt.location;
  const size_t slash = name.rfind('/') + 1;  // 0 without one
  const std::string base = name.substr(std::min(name.find_first_not_of('.', slash), name.size()));
  const std::string scratch = attempt_temporary(attempt.id(), base);
  const bool renames = storage.facts().renames;
  bool made = false;
  try {
    if (renames) {  // who ends the attempt removes the scratch file
      storage.prepare_put(scratch, bytes, deadline);
      if (!has_begun(attempt)) fail_ended(attempt);
      made = storage.put_prepared(name, bytes, Condition::absent(), scratch, deadline);
    } else {
      made = storage.put(name, bytes, Condition::absent(), scratch, deadline);
    }
  } catch (const Error&) {
    remove_files(storage, std::vector{scratch});
    // A request whose answer was lost may have been done, or another process may have done it.
    if (!holds(attempt, name, bytes)) throw;
  }
  if (made && !renames) expect_not_over(attempt, name, bytes);
  if (made) return true;
  remove_files(storage, std::vector{scratch});
  storage.settle(name.substr(0, std::max<size_t>(slash, 1) - 1));
  return holds(attempt, name, bytes);
}

[[noreturn]] void fail_foreign(const Attempt& attempt, const IndexFile& file) {
  expect_first(attempt);  // then the file belongs to another save
  throw Error(ErrorCode::kAlreadyExists,
              "the save " + attempt.id() + " can't publish a file of its index at " +
                  attempt.location->describe() + ": another file has its name")
      .with_file(file.name)
      .with_hint("move that file away; then `tilestone publish` completes the save");
}

void publish_rank_file(const Attempt& attempt, const IndexFile& file, Deadline deadline) {
  if (holds(attempt, file.name, file.bytes)) return;
  if (publish_or_find(attempt, file.name, file.bytes, deadline)) return;
  throw Error(ErrorCode::kAlreadyExists, "the metadata of a rank does not belong to the save " +
                                             attempt.id() + ", or is damaged")
      .with_file(file.name)
      .with_hint(
          "if it is only damaged, remove it and publish again: the receipt of its rank is kept; "
          "if a later save wrote it, the older save can't be published");
}

void publish_files(const Attempt& attempt, const Index& index, int threads, Deadline deadline) {
  if (attempt.head.rank_local) {
    return ThreadPool(files_at_once(thread_count(threads)))
        .parallel_for(index.size(),
                      [&](size_t rank) { publish_rank_file(attempt, index[rank], deadline); });
  }
  const IndexFile& first = index.front();
  const std::span<const IndexFile> later = std::span(index).subspan(1);
  for (const IndexFile& file : later) {
    const auto existing = read_if_there(*attempt.location, file.name);
    if (existing && *existing != file.bytes) fail_foreign(attempt, file);
  }
  if (!publish_or_find(attempt, first.name, first.bytes, deadline)) {
    fail_not_first(attempt, first.name);
  }
  for (const IndexFile& file : later) {
    if (!publish_or_find(attempt, file.name, file.bytes, Deadline::never())) {
      fail_foreign(attempt, file);
    }
  }
}

void expect_files_again(const Attempt& attempt, const AllLeft& all, int threads,
                        Deadline deadline) {
  // Of a published save, a later one may have removed the files.
  if (read_outcome(*attempt.location, attempt.id())) return;
  expect_files(*attempt.location, all.receipts, threads, deadline);
}

void expect_first_or_end(const Attempt& attempt) {
  check_or_end(attempt, [&] { expect_first(attempt); });
}

// False: another process has published it, and is removing the groups.
bool publish(const Attempt& attempt, bool again, int threads, Deadline deadline) {
  Storage& storage = *attempt.location;
  if (!has_begun(attempt)) return false;
  {
    const WorkClaim claim(attempt.location, publisher_claim(attempt.id()));
    auto all = read_merged(attempt);
    if (!all) return false;
    if (again) expect_files_again(attempt, *all, threads, deadline);
    const NewIndex made = check_or_end(attempt, [&] {
      return attempt.head.rank_local ? describe_ranks(attempt, *std::move(all))
                                     : describe_checked(attempt, *std::move(all));
    });
    expect_first_or_end(attempt);
    if (!made.manifest.empty()) {
      storage.settle(attempt_directory(attempt.id()));
      publish_or_find(attempt, manifest_name(attempt.id()), made.manifest, deadline);
    }
    if (decide(storage, attempt.id(), Outcome::kPublished, deadline) == Outcome::kAbandoned) {
      fail_abandoned(attempt);
    }
    publish_files(attempt, made.index, threads, deadline.without_interrupt());
  }
  clean(attempt);
  return true;
}

// ---- Waiting

// At random, so that not all ranks of a large world look for a publisher that has died at once.
Deadline next_takeover(const AttemptHead& head) {
  const double spread = 3 * std::max(1.0, head.world_size / kManyRanks);
  std::random_device random;
  return Deadline::after(kTakeOver * (1 + spread * random() / std::random_device::max()));
}

// Looks only at the groups up to the first incomplete one, because every rank of a large job does
// this at the same time.
[[noreturn]] void fail_missing(const Attempt& attempt) {
  const std::vector<int> missing = attempt.meeting->missing(false);
  if (missing.empty()) {
    throw Error(ErrorCode::kTimeout, "the save " + attempt.id() +
                                         " was not published before the deadline, though all ranks "
                                         "have written")
        .with_hint("`tilestone publish` makes it the checkpoint");
  }
  const bool one = missing.size() == 1;
  throw Error(ErrorCode::kTimeout, ranks_text(missing) +
                                       " had not written when the deadline of the save " +
                                       attempt.id() + " passed")
      .with_rank(missing.front())
      .with_hint(std::string("the other ranks' files are kept: ") +
                 (one ? "this rank" : "these ranks") +
                 " can save again under the same token, or `tilestone gc --abandon` ends the save; "
                 "ranks that say this of one another see different directories at one path");
}

// Throws unless the attempt was published just now, so that the files that seem missing were
// removed.
void fail_at_deadline(const Attempt& attempt) {
  try {
    expect_first(attempt);
    fail_missing(attempt);
  } catch (const Error&) {
    if (phase_of(attempt) != Phase::kPublished) throw;
  }
}

}  // namespace

bool publish_if_complete(const Attempt& attempt, bool again, int threads, Deadline deadline) {
  const bool looks_at_all = again && attempt.head.rank_local;
  if (is_finished(attempt) && !looks_at_all) return true;
  try {
    expect_first_or_end(attempt);
    const bool all = merge_groups(attempt, threads, deadline);
    return (all && publish(attempt, again, threads, deadline)) || is_finished(attempt);
  } catch (const Error& error) {
    // Another process may have published it, and removed the files that this one was reading.
    const bool may_stand = error.code() != ErrorCode::kAlreadyExists &&
                           is_published(read_outcome(*attempt.location, attempt.id()));
    if (may_stand && phase_of(attempt) == Phase::kPublished) return true;
    throw;
  }
}

bool can_be_published(const Attempt& attempt, Deadline deadline) {
  constexpr int kThreads = 0;  // the default
  try {
    if (!merge_groups(attempt, kThreads, deadline)) return true;
    auto all = read_merged(attempt);
    if (!all) return true;  // somebody is publishing it
    expect_files_again(attempt, *all, kThreads, deadline);
    if (!attempt.head.rank_local) describe_checked(attempt, *std::move(all));
    return true;
  } catch (const Error& error) {
    if (!prevents_publishing(error.code())) throw;
    return false;
  }
}

void wait_published(const Attempt& attempt, int threads, Deadline deadline) {
  Deadline patience = next_takeover(attempt.head);
  int claimed_looks = 0;
  for (Pauses pauses(attempt.head.world_size);; pauses.next(deadline)) {
    if (phase_of(attempt) == Phase::kPublished) return;
    if (deadline.expired()) return fail_at_deadline(attempt);
    if (!patience.expired()) continue;
    expect_first(attempt);
    // Tries all groups: the ranks of another group may have died, or returned, after they reported.
    // A publisher that is stopped keeps its claim; two do no harm.
    const bool tries = !is_claimed(*attempt.location, publisher_claim(attempt.id())) ||
                       ++claimed_looks > kMostClaimedLooks;
    if (tries && publish_if_complete(attempt, false, threads, deadline)) return;
    patience = next_takeover(attempt.head);
  }
}

}  // namespace tilestone::engine
