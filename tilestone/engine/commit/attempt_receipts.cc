// The receipts of the ranks of a save without a communicator: step 2 of the protocol in attempt.cc.
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/commit/attempt_internal.h"
#include "tilestone/engine/commit/presence_internal.h"
#include "tilestone/engine/open/attempt_files_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/format/manifest.h"
#include "tilestone/plan/receipt.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

int Attempt::first_free_file(int rank, int count) const {
  int first = 0;
  for (int number = 0; number < first + count; ++number) {
    if (location_->stat(format_->data_file_name(head_.save_id, rank, number))) first = number + 1;
  }
  return first;
}

bool Attempt::leave_receipt(int rank, const AttemptReceipt& left, Deadline deadline) {
  next_rank_ = rank + 1;
  const int group = head_.group_of(rank);
  const std::string name = attempt_receipt_name(head_, rank);
  const Bytes bytes = left.encode();
  try {
    location_->make_directory(group_directory(head_.save_id, group));
    location_->publish(name, group_temporary(head_.save_id, group, "report"), bytes, false,
                       deadline);
    location_->sync_directory(attempt_directory(head_.save_id));
  } catch (const Error&) {
    // The existing file counts, whatever error the call got. If a request reached a file server
    // twice, the second answer is that the name exists. And the rename may have succeeded although
    // the removal of the temporary name failed.
    const auto standing = counted_receipt(*location_, head_, rank);
    if (standing && *standing != bytes) return false;
    const bool is_durable = standing && sync_receipt(group);
    // If the save has ended, the directory was removed, and the checkpoint may include this
    // receipt: its data files must stay.
    if (!is_durable && !has_ended()) throw;
    return true;
  }
  if (!location_->stat(group_name(head_.save_id, group))) return true;
  const auto counted = counted_receipt(*location_, head_, rank);
  if (!counted || *counted == bytes) return true;
  remove_files(*location_, std::vector{name});
  return false;
}

bool Attempt::sync_receipt(int group) const {
  try {
    location_->sync_directory(group_directory(head_.save_id, group));
    location_->sync_directory(attempt_directory(head_.save_id));
    return true;
  } catch (const Error&) {
    return false;
  }
}

// Whether it was published. Throws if it was abandoned.
bool Attempt::has_ended() const {
  const auto outcome = read_outcome(*location_, head_.save_id);
  if (outcome == Outcome::kAbandoned) fail_abandoned();
  return outcome == Outcome::kPublished;
}

bool Attempt::has_receipt(int rank) const {
  return location_->stat(attempt_receipt_name(head_, rank)) ||
         location_->stat(group_name(head_.save_id, head_.group_of(rank)));
}

void Attempt::expect_files_of_merged(int threads, Deadline deadline) const {
  if (read_outcome(*location_, head_.save_id)) return;  // a later save may have removed them
  std::vector<Receipt> receipts;
  for (int group = 0; group < head_.group_count(); ++group) {
    const auto merged = read_group(*location_, head_, group);
    if (!merged) continue;  // merging looks for its files
    for (const Bytes& left : *merged) {
      const std::string name = group_name(head_.save_id, group);
      receipts.push_back(Receipt::decode(AttemptReceipt::decode(left, name).receipt));
    }
  }
  expect_files(*location_, receipts, threads, deadline);
}

// A receipt is removed only after it was merged, and the merged file only after the outcome was
// made.
bool Attempt::surely_lacks_receipt(int rank) const noexcept {
  try {
    return !counted_receipt(*location_, head_, rank) &&
           read_outcome(*location_, head_.save_id) != Outcome::kPublished;
  } catch (...) {
    return false;
  }
}

std::optional<AttemptReceipt> Attempt::receipt_of(int rank) const {
  const auto bytes = has_receipt(rank) ? counted_receipt(*location_, head_, rank) : std::nullopt;
  if (!bytes) return std::nullopt;
  return AttemptReceipt::decode(*bytes, attempt_receipt_name(head_, rank));
}

std::optional<Receipt> Attempt::published_receipt_of(int rank) const {
  const std::string name = manifest_name(head_.save_id);
  const auto bytes = read_if_there(*location_, name);
  if (!bytes) return std::nullopt;
  Manifest manifest = Manifest::decode(*bytes, name);
  const auto number = static_cast<size_t>(rank);
  if (number >= manifest.receipts.size()) return std::nullopt;
  return std::move(manifest.receipts[number]);
}

}  // namespace tilestone::engine
