// Step 2 of the protocol in attempt.cc: a rank leaves its receipt.
#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/commit/attempt_internal.h"
#include "tilestone/engine/commit/attempt_parts_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/format/data_file_name.h"
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

// After the save has ended: whether the checkpoint has this receipt, and not that of another
// process of this rank. True if its manifest was removed since. No two processes give a data file
// the same name.
bool is_in_manifest(const Attempt& attempt, int rank, const AttemptReceipt& left) {
  const auto published = published_receipt_of(attempt, rank);
  if (!published) return true;
  const std::vector<ReceiptFile> own = Receipt::decode(left.receipt).files,
                                 &others = published->files;
  if (own.empty()) return others.empty();
  return std::any_of(own.begin(), own.end(), [&](const ReceiptFile& file) {
    return std::any_of(others.begin(), others.end(),
                       [&](const ReceiptFile& other) { return other.name == file.name; });
  });
}

}  // namespace

int first_free_file(const Attempt& attempt, int rank, int count) {
  int first = 0;
  for (int number = 0; number < first + count; ++number) {
    const std::string name = data_file_name(attempt.id(), rank, number);
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
    storage.publish(name, group_temporary(attempt.id(), group, "report"), bytes, false, deadline);
    storage.sync_directory(attempt_directory(attempt.id()));
  } catch (const Error&) {
    // The existing file counts, whatever error the call got. If a request reached a file server
    // twice, the second answer is that the name exists. And the rename may have succeeded although
    // the removal of the temporary name failed.
    const auto existing = counted_receipt(storage, attempt.head, rank);
    if (existing && *existing != bytes) return false;
    if (existing && sync_receipt(attempt, group)) return true;
    if (!outcome_is_published(attempt)) throw;
    return is_in_manifest(attempt, rank, left);
  }
  if (const auto merged = read_group(storage, attempt.head, group)) {
    if ((*merged)[static_cast<size_t>(rank - attempt.head.group_begin(group))] == bytes)
      return true;
    remove_files(storage, std::vector{name});
    return false;
  }
  const bool ended = read_outcome(storage, attempt.id()) == Outcome::kPublished;
  return !ended || is_in_manifest(attempt, rank, left);
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
