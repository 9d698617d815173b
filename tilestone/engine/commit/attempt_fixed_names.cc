// Saves without a communicator in a dialect whose index has files with fixed names:
// Megatron-Core's, with common.pt and metadata.json beside .metadata. One step can't switch the
// three files, and two attempts would use the same names. The protocol of attempt.cc changes as
// follows:
//
//  1. Join, as there. Also refused if one of the dialect's files exists.
//  2. As there. Rank 0's receipt contains the dialect's files, because only rank 0 knows the common
//     state that is saved. So all processes that merge the receipts make the same bytes.
//  3. and 4. As there.
//  5. Publish the index file by file, never over another file. An existing file with the same bytes
//     belongs to this save: another process has made it.
//     a. Check that none of the later files exists with other bytes.
//     b. Publish .metadata. It names the save, so it is the claim: a process that finds another
//        save's .metadata has changed nothing, and ends with kAlreadyExists. Then publish
//        common.pt. Once the claim exists, no deadline ends the call.
//     c. Publish metadata.json, the switch.
//  6. As there.
//
// There is no separate file for the claim, because .metadata is sufficient. This also holds between
// this dialect and PyTorch's, in which .metadata is the switch. And no claim file need be removed.
//
// Between b and c the save is unpublished: our readers do not accept it as a checkpoint
// (claimed_by() in open/opening.cc), and Megatron-Core's do not without a metadata.json. Stock
// torch, which reads .metadata alone, finds a complete checkpoint at that time: all files that
// .metadata names are durable, and once it exists no other save can become the checkpoint.
//
// Races, in addition to those of attempt.cc:
//  - Two publishers: both write the same bytes, so each continues where the other is, and removes
//    what is left.
//  - Two attempts: the first .metadata decides. The other attempt has the outcome "published" and
//    can't become a checkpoint. Its files are leftovers once the first checkpoint exists; until
//    then `publish` says which attempt is first.
//  - A claim whose publisher dies: a waiting process, or one that calls publish(), makes the
//    missing files. Another save is refused when it joins. abandon() refuses, because all ranks
//    have written.
//  - A publisher that stalls: before b as in attempt.cc. After b it finds the file that it was
//    about to make, or the attempt's directory, through which it makes all its files, is gone.
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

#include "tilestone/base/error.h"
#include "tilestone/engine/commit/attempt_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/description_internal.h"
#include "tilestone/engine/open/detect_internal.h"

namespace tilestone::engine {

// ---- Step 1

void Attempt::refuse_fixed_names(const std::vector<std::string>& names) const {
  const auto claim = format_->detect(names) ? claimed_by(*location_) : std::nullopt;
  if (claim) {
    throw Error(ErrorCode::kAlreadyExists,
                "the save " + *claim + " is being published at " + location_->describe())
        .with_hint("`tilestone publish` completes it if nobody does; save elsewhere");
  }
  if (!dialect_->has_fixed_names()) return;
  for (const std::string& name : dialect_->index_files(names)) {
    throw Error(ErrorCode::kAlreadyExists,
                "a file with a name that this save needs exists at " + location_->describe())
        .with_file(name)
        .with_hint("save elsewhere, or move the file: a failed save may have left it");
  }
}

// Checks again after the head was published. If another save has begun at the same time, takes the
// head back and throws. It may happen that neither of the two saves continues.
void Attempt::expect_still_free(Deadline deadline) const {
  try {
    refuse_other_attempts(deadline);
    if (!head_.rank_local) refuse_existing();
  } catch (...) {
    // With an outcome, the other ranks have completed the save meanwhile, and the refused files may
    // be theirs.
    if (read_outcome(*location_, head_.save_id)) return;
    remove_files(*location_, std::vector{attempt_name(head_.save_id)});
    throw;
  }
}

// ---- Step 5

Index Attempt::files_of_dialect(AttemptReceipt& of_rank_0) const {
  std::vector<std::string> names;
  for (const IndexFile& file : of_rank_0.of_dialect) names.push_back(file.name);
  std::sort(names.begin(), names.end());
  const bool known = dialect_->index_files(names) == names;
  if (known && dialect_->has_fixed_names() != names.empty()) return std::move(of_rank_0.of_dialect);
  throw Error(ErrorCode::kCorrupt,
              "the receipt of rank 0 lacks the index files of the dialect " + head_.dialect)
      .with_rank(0);
}

void Attempt::publish_index(const Index& index, Deadline deadline) const {
  for (const IndexFile& file : index) {
    if (&file != &index.front()) expect_own_or_none(file);
  }
  if (!publish_or_find(index.front(), deadline)) fail_not_first(index.front().name);
  for (const IndexFile& file : index) {
    if (&file == &index.front()) continue;
    if (!publish_or_find(file, Deadline::never())) fail_foreign(file);
  }
}

void Attempt::expect_own_or_none(const IndexFile& file) const {
  const auto standing = read_if_there(*location_, file.name);
  if (standing && *standing != file.bytes) fail_foreign(file);
}

void Attempt::fail_not_first(const std::string& file) const {
  const auto claim = claimed_by(*location_);
  Error error(ErrorCode::kAlreadyExists,
              claim ? "the save " + *claim + " came before the save " + head_.save_id + " at " +
                          location_->describe() + ", and is being published"
                    : "another checkpoint was published at " + location_->describe() +
                          " before the save " + head_.save_id);
  if (claim) {
    error.with_hint(
        "`tilestone publish` completes that save if nobody does; then `tilestone gc` removes the "
        "files of this one");
  }
  throw std::move(error).with_file(file);
}

// Another save may have become the checkpoint while this one waited for its ranks. Looks up one
// name as long as there is no index, because many ranks wait.
void Attempt::expect_first() const {
  const std::string name = format_->encode_index({}).front().name;
  if (head_.rank_local || !location_->stat(name) || is_published()) return;
  std::optional<std::string> first = claimed_by(*location_);
  if (!first) {
    try {
      const Standing standing = read_standing(*location_, format_);
      if (standing.found) first = standing.save_id;
    } catch (const Error&) {
      return;  // it is being replaced, or is damaged
    }
  }
  if (first && *first != head_.save_id) fail_not_first(name);
}

void Attempt::fail_foreign(const IndexFile& file) const {
  expect_first();  // then the file belongs to another save
  throw Error(ErrorCode::kAlreadyExists, "the save " + head_.save_id +
                                             " can't publish a file of its index at " +
                                             location_->describe() + ": another file has its name")
      .with_file(file.name)
      .with_hint("move that file away; then `tilestone publish` completes the save");
}

}  // namespace tilestone::engine
