// Saves without a communicator in a dialect whose files of the index have fixed names:
// Megatron-Core's, with common.pt and metadata.json beside .metadata. Nothing can switch the three
// in one step, and two attempts would use the same names, so the protocol of attempt.cc becomes:
//
//  1. Join, as there. Refused too where a file of the dialect's stands.
//  2. As there. Rank 0's report holds the dialect's files: it alone knows the common state that is
//     saved. So all who merge the reports make the same bytes.
//  3. and 4. As there.
//  5. Publish the index file by file, none over another. A file that stands there with the same
//     bytes is this save's own: somebody has made it before.
//     a. See that none of b's later files stands there with other bytes.
//     b. .metadata. It names the save, so it is the claim: who finds another save's there has
//        changed nothing, and ends with kAlreadyExists. common.pt follows. No deadline ends the
//        call once the claim stands.
//     c. metadata.json, the switch.
//  6. As there.
//
// There is no file for the claim alone: .metadata does what it would, also between this dialect
// and PyTorch's, in which it is the switch, and nothing is left to be removed.
//
// Between b and c the save is unpublished: no reader of ours takes it for a checkpoint
// (claimed_by() in open/opening.cc), and Megatron-Core none without a metadata.json. Stock torch,
// which asks for .metadata alone, finds a whole checkpoint then: all that .metadata names is
// durable, and once it stands no other save can become the checkpoint.
//
// Races beside those of attempt.cc:
//  two publishers           All files have the same bytes whoever makes them, so each goes on where
//                           the other is, and cleans what is left.
//  two attempts             The first .metadata decides. The other attempt has the outcome
//                           "published" and can't become a checkpoint: its files are leftovers once
//                           the first one stands, and until then `publish` says which is first.
//  a claim whose publisher dies
//                           Whoever waits, or calls publish(), makes what is missing. Another save
//                           is refused when it joins; abandon() refuses, since all have written.
//  a publisher that stalls  Before b as in attempt.cc. Later it finds what it was about to make, or
//                           the attempt's directory gone, through which it makes all its files.
//  a save with a communicator
//                           It refuses as long as the attempt is open, and it is open until the
//                           switch stands. After that it replaces the directory as a whole, with
//                           what is left of the attempt.
//
// A crash at any point: before b as in attempt.cc. From b on each file is durable before the next
// one, and who comes later begins with a again.
#include <algorithm>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/commit/attempt_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/opening_internal.h"

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
                "a file of a name that this save needs stands at " + location_->describe())
        .with_file(name)
        .with_hint("save elsewhere, or move the file: a save that failed may have left it");
  }
}

// Where another save has begun at the same time, none of the two goes on.
void Attempt::expect_still_free(Deadline deadline) const {
  try {
    refuse_other_attempts(deadline);
    if (!head_.rank_local) refuse_standing();
  } catch (...) {
    // The other ranks have come to the end meanwhile, and what stands there may be their work.
    if (read_outcome(*location_, head_.save_id)) return;
    remove_files(*location_, std::vector{attempt_name(head_.save_id)});
    throw;
  }
}

// ---- Step 5

Index Attempt::files_of_dialect(LeftReport& of_rank_0) const {
  std::vector<std::string> names;
  for (const IndexFile& file : of_rank_0.of_dialect) names.push_back(file.name);
  std::sort(names.begin(), names.end());
  const bool known = dialect_->index_files(names) == names;
  if (known && dialect_->has_fixed_names() != names.empty()) return std::move(of_rank_0.of_dialect);
  throw Error(ErrorCode::kCorrupt,
              "the report of rank 0 does not hold the files that the dialect " + head_.dialect +
                  " has beside those of the format")
      .with_rank(0);
}

void Attempt::publish_index(const Index& index, Deadline deadline) const {
  for (const IndexFile& file : index) {
    if (&file != &index.front()) expect_own_or_none(file);
  }
  if (!publish_or_find(index.front(), deadline)) fail_second(index.front());
  for (const IndexFile& file : index) {
    if (&file == &index.front()) continue;
    if (!publish_or_find(file, Deadline::never())) fail_foreign(file);
  }
}

void Attempt::expect_own_or_none(const IndexFile& file) const {
  const auto standing = read_if_there(*location_, file.name);
  if (standing && *standing != file.bytes) fail_foreign(file);
}

void Attempt::fail_second(const IndexFile& file) const {
  const auto claim = claimed_by(*location_);
  Error error(ErrorCode::kAlreadyExists,
              claim ? "the save " + *claim + " has come before the save " + head_.save_id + " at " +
                          location_->describe() + ", and is being published"
                    : "another checkpoint was published at " + location_->describe() +
                          " before the save " + head_.save_id);
  if (claim) {
    error.with_hint(
        "`tilestone publish` completes that save if nobody does; then `tilestone gc` removes the "
        "files of this one");
  }
  throw std::move(error).with_file(file.name);
}

void Attempt::fail_foreign(const IndexFile& file) const {
  throw Error(ErrorCode::kAlreadyExists, "a file that is not of the save " + head_.save_id +
                                             " has its name at " + location_->describe())
      .with_file(file.name)
      .with_hint("move it away, and `tilestone publish` completes the save");
}

}  // namespace tilestone::engine
