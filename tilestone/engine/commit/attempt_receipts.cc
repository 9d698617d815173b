// Step 2 of the protocol in attempt.cc: a rank leaves its receipt.
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/commit/attempt_internal.h"
#include "tilestone/engine/commit/attempt_parts_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/format/manifest.h"

namespace tilestone::engine {
namespace {

// False: the receipt may not be durable.
bool sync_receipt(const Attempt& attempt, int group) {
  try {
    attempt.location->sync_directory(group_directory(attempt.id(), group));
    attempt.location->sync_directory(attempt_directory(attempt.id()));
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

int first_free_file(const Attempt& attempt, int rank, int count) {
  int first = 0;
  for (int number = 0; number < first + count; ++number) {
    const std::string name = attempt.format->data_file_name(attempt.id(), rank, number);
    if (attempt.location->stat(name)) first = number + 1;
  }
  return first;
}

bool leave_receipt(Attempt& attempt, int rank, const AttemptReceipt& left, Deadline deadline) {
  attempt.next_rank = rank + 1;
  Storage& storage = *attempt.location;
  const int group = attempt.head.group_of(rank);
  const std::string name = attempt_receipt_name(attempt.head, rank);
  const Bytes bytes = left.encode();
  try {
    storage.make_directory(group_directory(attempt.id(), group));
    storage.publish(name, group_temporary(attempt.id(), group, "report"), bytes, false, deadline);
    storage.sync_directory(attempt_directory(attempt.id()));
  } catch (const Error&) {
    // The existing file counts, whatever error the call got. If a request reached a file server
    // twice, the second answer is that the name exists. And the rename may have succeeded although
    // the removal of the temporary name failed.
    const auto existing = counted_receipt(storage, attempt.head, rank);
    if (existing && *existing != bytes) return false;
    const bool is_durable = existing && sync_receipt(attempt, group);
    // If the save has ended, the directory was removed, and the checkpoint may include this
    // receipt: its data files must stay.
    if (!is_durable && !has_ended(attempt)) throw;
    return true;
  }
  if (!storage.stat(group_name(attempt.id(), group))) return true;
  const auto counted = counted_receipt(storage, attempt.head, rank);
  if (!counted || *counted == bytes) return true;
  remove_files(storage, std::vector{name});
  return false;
}

bool has_receipt(const Attempt& attempt, int rank) {
  return attempt.location->stat(attempt_receipt_name(attempt.head, rank)) ||
         attempt.location->stat(group_name(attempt.id(), attempt.head.group_of(rank)));
}

// A receipt is removed only after it was merged, and the merged file only after the outcome was
// made.
bool surely_lacks_receipt(const Attempt& attempt, int rank) noexcept {
  try {
    return !counted_receipt(*attempt.location, attempt.head, rank) &&
           read_outcome(*attempt.location, attempt.id()) != Outcome::kPublished;
  } catch (...) {
    return false;
  }
}

std::optional<AttemptReceipt> receipt_of(const Attempt& attempt, int rank) {
  if (!has_receipt(attempt, rank)) return std::nullopt;
  const auto bytes = counted_receipt(*attempt.location, attempt.head, rank);
  if (!bytes) return std::nullopt;
  return AttemptReceipt::decode(*bytes, attempt_receipt_name(attempt.head, rank));
}

std::optional<Receipt> published_receipt_of(const Attempt& attempt, int rank) {
  const std::string name = manifest_name(attempt.id());
  const auto bytes = read_if_there(*attempt.location, name);
  if (!bytes) return std::nullopt;
  Manifest manifest = Manifest::decode(*bytes, name);
  const auto number = static_cast<size_t>(rank);
  if (number >= manifest.receipts.size()) return std::nullopt;
  return std::move(manifest.receipts[number]);
}

}  // namespace tilestone::engine
