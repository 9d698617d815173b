// Steps 4 and 5 of the protocol in attempt.cc: the outcome is made, and the index published.
//
// In a dialect whose index has files with fixed names (Megatron-Core's, with common.pt and
// metadata.json beside .metadata), one step can't switch the three files, and two attempts would
// use the same names. The protocol changes as follows:
//
//  1. Join, as there. Also refused if one of the dialect's files exists.
//  2. As there. Rank 0's receipt contains the dialect's files, because only rank 0 knows the common
//     state that is saved. So all processes that merge the receipts make the same bytes.
//  3. and 4. As there.
//  5. Publish the index file by file, never over another file. An existing file with the same bytes
//     belongs to this save: another process has made it.
//     a. Check that none of the later files exists with other bytes.
//     b. Publish .metadata. It names the save, so it decides which attempt is first: a process that
//        finds another save's .metadata has changed nothing, and ends with kAlreadyExists. Then
//        publish common.pt. Once .metadata exists, no deadline ends the call.
//     c. Publish metadata.json, the switch.
//  6. As there.
//
// This also holds between this dialect and PyTorch's, in which .metadata is the switch.
//
// Between b and c the save is unpublished: our readers do not accept it as a checkpoint
// (partly_published_by() in open/detect.cc), and Megatron-Core's do not without a metadata.json.
// Stock torch, which reads .metadata alone, finds a complete checkpoint at that time: all files
// that .metadata names are durable, and once it exists no other save can become the checkpoint.
//
// Races, in addition to those of attempt.cc:
//  - Two publishers: both write the same bytes, so each continues where the other is, and removes
//    what is left.
//  - Two attempts: the first .metadata decides. The other attempt has the outcome "published" and
//    can't become a checkpoint. Its files are leftovers once the first checkpoint exists; until
//    then `publish` says which attempt is first.
//  - A publisher that dies after b: a waiting process, or one that calls publish(), makes the
//    missing files. Another save is refused when it joins. abandon() refuses, because all ranks
//    have written.
//  - A publisher that stalls: as in attempt.cc, at each of the files.
//  - A save with a communicator: it refuses as long as the attempt is open, which it is until the
//    switch exists. After that, the save replaces the directory as a whole, with the rest of the
//    attempt.
//
// A crash at any point: before b as in attempt.cc. From b on each file is durable before the next
// one is made, and the next publisher starts again with a.
#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/commit/attempt_internal.h"
#include "tilestone/engine/commit/attempt_parts_internal.h"
#include "tilestone/engine/commit/presence_internal.h"
#include "tilestone/engine/commit/work_claim_internal.h"
#include "tilestone/engine/open/description_internal.h"
#include "tilestone/engine/open/detect_internal.h"
#include "tilestone/format/manifest.h"

namespace tilestone::engine {
namespace {

constexpr int kRanksLookedForAgain = 64;

std::string base_of(const std::string& name) {
  const std::string last = name.substr(name.rfind('/') + 1);
  return last.substr(std::min(last.find_first_not_of('.'), last.size()));
}

void refuse_metadata_of_group(const Attempt& attempt, std::vector<Receipt> receipts, Deadline) {
  check_or_end(attempt, [&] {
    refuse_rank_metadata(attempt, receipts.front().rank, receipts.back().rank + 1);
  });
}

// False: another process has published it, and is removing the groups.
bool publish(const Attempt& attempt, Look look, int threads, Deadline deadline) {
  {
    if (!has_begun(attempt)) return false;
    const WorkClaim claim(attempt.location, publisher_claim(attempt.id()));
    auto all = read_merged(attempt);
    if (!all) return false;
    expect_files_again(attempt, *all, look, threads, deadline);
    const NewIndex made = check_or_end(attempt, [&] {
      NewIndex index = describe_checked(attempt, *std::move(all));
      refuse_rank_metadata(attempt, 0, std::min(attempt.head.world_size, kRanksLookedForAgain));
      expect_first(attempt);
      return index;
    });
    publish_manifest(attempt, made.manifest, deadline);
    publish_index(attempt, made.index, deadline);
  }
  clean(attempt);
  return true;
}

// Others may have published, and have removed the attempt's directory, which a temporary file then
// has made anew.
void expect_not_cleaned(const Attempt& attempt) {
  if (has_begun(attempt)) return;
  attempt.location->remove_tree(attempt_directory(attempt.id()));
  throw Error(ErrorCode::kNotFound, "the save " + attempt.id() + " has ended meanwhile")
      .with_file(attempt_name(attempt.id()));
}

bool holds(const Attempt& attempt, const std::string& name, ByteView bytes) {
  const auto found = read_if_there(*attempt.location, name);
  return found && std::ranges::equal(*found, bytes);
}

[[noreturn]] void fail_foreign(const Attempt& attempt, const IndexFile& file) {
  expect_first(attempt);  // then the file belongs to another save
  throw Error(ErrorCode::kAlreadyExists,
              "the save " + attempt.id() + " can't publish a file of its index at " +
                  attempt.location->describe() + ": another file has its name")
      .with_file(file.name)
      .with_hint("move that file away; then `tilestone publish` completes the save");
}

}  // namespace

bool publish_if_complete(const Attempt& attempt, Look look, int threads, Deadline deadline) {
  if (is_finished(attempt)) return true;
  return unless_published(attempt, [&] {
    if (!merge_groups(attempt, look, refuse_metadata_of_group, threads, deadline)) {
      return was_published(attempt);
    }
    return publish(attempt, look, threads, deadline) || switch_is_published(attempt);
  });
}

bool can_be_published(const Attempt& attempt, Deadline deadline) {
  constexpr int kThreads = 0;  // the default
  try {
    const auto nothing = [](const Attempt&, std::vector<Receipt>, Deadline) {};
    if (!merge_groups(attempt, Look::kAll, nothing, kThreads, deadline)) return true;
    auto all = read_merged(attempt);
    if (!all) return true;  // somebody is publishing it
    expect_files_again(attempt, *all, Look::kAgain, kThreads, deadline);
    describe_checked(attempt, *std::move(all));
    return true;
  } catch (const Error& error) {
    if (!prevents_publishing(error.code())) throw;
    return false;
  }
}

void expect_files_again(const Attempt& attempt, const AllLeft& all, Look look, int threads,
                        Deadline deadline) {
  if (look != Look::kAgain || read_outcome(*attempt.location, attempt.id())) return;
  expect_files(*attempt.location, all.receipts, threads, deadline);
}

// The rank that begins a save lists the location, which is fresh then. Later a listing would have
// an entry for each rank, so the names are asked for: those of a group when it is merged, and those
// of the first ranks again before the switch.
void refuse_rank_metadata(const Attempt& attempt, int begin, int end) {
  for (int rank = begin; rank < end; ++rank) {
    const std::string name = attempt.format->rank_index_name(rank);
    if (name.empty()) return;
    if (!attempt.location->stat(name)) continue;
    throw Error(ErrorCode::kAlreadyExists, "the save " + attempt.id() + " can't be published at " +
                                               attempt.location->describe() +
                                               ": metadata of a rank-local save is there")
        .with_file(name)
        .with_hint("save elsewhere, or move those files away and save under another number");
  }
}

void publish_manifest(const Attempt& attempt, const Bytes& manifest, Deadline deadline) {
  attempt.location->settle(attempt_directory(attempt.id()));
  publish_unless_there(attempt, manifest_name(attempt.id()),
                       attempt_temporary(attempt.id(), "manifest"), manifest, deadline);
}

void publish_index(const Attempt& attempt, const Index& index, Deadline deadline) {
  if (decide(*attempt.location, attempt.id(), Outcome::kPublished, deadline) ==
      Outcome::kAbandoned) {
    fail_abandoned(attempt);
  }
  publish_files(attempt, index, deadline.without_interrupt());
}

bool publish_unless_there(const Attempt& attempt, const std::string& name,
                          const std::string& temp_name, ByteView bytes, Deadline deadline) {
  try {
    attempt.location->prepare_put(temp_name, bytes, deadline);
    expect_not_cleaned(attempt);
    if (attempt.location->put_prepared(name, bytes, Condition::absent(), temp_name, deadline)) {
      return true;
    }
  } catch (const Error&) {
    remove_files(*attempt.location, std::vector{temp_name});
    // A request whose answer was lost may have been done, or another process may have done it.
    if (!holds(attempt, name, bytes)) throw;
  }
  remove_files(*attempt.location, std::vector{temp_name});
  const size_t slash = name.rfind('/');
  attempt.location->settle(slash == std::string::npos ? "" : name.substr(0, slash));
  return false;
}

bool publish_or_find(const Attempt& attempt, const IndexFile& file, Deadline deadline) {
  return publish_unless_there(attempt, file.name,
                              attempt_temporary(attempt.id(), base_of(file.name)), file.bytes,
                              deadline) ||
         holds(attempt, file.name, file.bytes);
}

// ---- The files of the index

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

void publish_files(const Attempt& attempt, const Index& index, Deadline deadline) {
  const IndexFile& first = index.front();
  for (const IndexFile& file : index) {
    const auto existing =
        &file == &first ? std::nullopt : read_if_there(*attempt.location, file.name);
    if (existing && *existing != file.bytes) fail_foreign(attempt, file);
  }
  if (!publish_or_find(attempt, first, deadline)) fail_not_first(attempt, first.name);
  for (const IndexFile& file : index) {
    if (&file == &first) continue;
    if (!publish_or_find(attempt, file, Deadline::never())) fail_foreign(attempt, file);
  }
}

void fail_not_first(const Attempt& attempt, const std::string& file) {
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

// Looks up one name as long as there is no index, because many ranks wait.
void expect_first(const Attempt& attempt) {
  const std::string name = attempt.format->encode_index({}).front().name;
  if (!attempt.location->stat(name) || switch_is_published(attempt)) return;
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

}  // namespace tilestone::engine
