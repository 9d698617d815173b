// Step 2 of the protocol in attempt.cc: a rank leaves its receipt.
#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/commit/attempt_internal.h"
#include "tilestone/engine/commit/attempt_parts_internal.h"
#include "tilestone/format/data_file_name.h"
#include "tilestone/format/manifest.h"

namespace tilestone::engine {
namespace {

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

// Once the save is published its receipts are removed, and one that is left then counts for nobody.
bool leave_receipt(const Attempt& attempt, int rank, const AttemptReceipt& left,
                   Deadline deadline) {
  const Bytes mine = left.encode();
  try {
    if (attempt.meeting->leave(mine, deadline) != mine) return false;
  } catch (const Error&) {
    if (!outcome_is_published(attempt)) throw;
  }
  const bool ended = read_outcome(*attempt.location, attempt.id()) == Outcome::kPublished;
  return !ended || is_in_manifest(attempt, rank, left);
}

std::optional<AttemptReceipt> receipt_of(const Attempt& attempt, int rank) {
  const auto bytes = attempt.meeting->message_of(rank);
  if (!bytes) return std::nullopt;
  return AttemptReceipt::decode(*bytes, attempt.meeting->file_of(rank));
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
