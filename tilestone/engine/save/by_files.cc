#include "tilestone/engine/save/by_files_internal.h"

#include <chrono>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/open/attempt_files_internal.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/engine/save/reported_before_internal.h"
#include "tilestone/plan/save_plan.h"
#include "tilestone/state/content_hash.h"
#include "tilestone/version.h"

namespace tilestone::engine {
namespace {

constexpr int kMaxNameTries =
    8;  // to find data file names that no other process of this rank takes
constexpr std::chrono::duration<double> kFailureTime{10};  // for leaving a failure

AttemptHead head_of(const SaveOptions& options) {
  AttemptHead head;
  head.save_id = save_id_of(options.by_files->token, options.by_files->number);
  head.world_size = options.by_files->world_size;
  head.format = format_of(options)->name();
  head.dialect = dialect_of(options)->name();
  head.writer = writer_name();
  head.common_differs = static_cast<uint8_t>(options.checks.common_differs);
  head.rank_local = options.by_files->torch_rank_local;
  head.token = xxh3_64(as_bytes(options.by_files->token));
  head.number = options.by_files->number;
  head.attributes = options.attributes;
  return head;
}

// The options, once they say who takes part.
const SaveOptions& checked(const SaveOptions& options) {
  check_by_files(options);
  return options;
}

// ---- Planning

// A holder outside the save might be the one chosen to write the chunk.
void check_holders(const SaveShare& share) {
  for (const PlanChunk& chunk : share.local.chunks) {
    if (chunk.holders == PlanChunk::kUnknown) continue;
    const std::vector<int>& holders = share.local.holder_sets[chunk.holders];
    if (holders.front() >= 0 && holders.back() < share.world_size) continue;
    const int outside = holders.front() < 0 ? holders.front() : holders.back();
    throw Error(ErrorCode::kInvalidArgument,
                "rank " + std::to_string(outside) + " is declared to hold box " +
                    to_string(chunk.box) + ", but the save's world_size is " +
                    std::to_string(share.world_size))
        .with_key(share.local.tensors[chunk.tensor].key)
        .with_rank(share.rank);
  }
}

// Warns about common tensors whose holders are not declared: every rank writes them.
void warn_of_undeclared(const SaveShare& share) {
  std::set<std::string_view> keys;
  uint64_t bytes = 0;
  for (const uint32_t i : share.assignment.chunks) {
    const PlanChunk& chunk = share.local.chunks[i];
    if (chunk.holders != PlanChunk::kUnknown || !chunk.common) continue;
    const PlanTensor& tensor = share.local.tensors[chunk.tensor];
    keys.insert(tensor.key);
    bytes += static_cast<uint64_t>(chunk.box.numel()) * itemsize(tensor.dtype);
  }
  if (keys.empty() || share.world_size == 1) return;
  log_once(LogLevel::kWarning,
           "the holders of " + std::to_string(keys.size()) + " tensors (" + std::to_string(bytes) +
               " bytes on this rank) are not declared, so each rank that has them writes them; "
               "the first is " +
               std::string(*keys.begin()));
}

// Compares this common state instead of the one that is saved.
void note_compared(SaveShare& share, const StateDict& compared) {
  const auto common = items_of(compared, share).common;
  if (!common) return;
  for (PlanObject& object : share.local.objects) {
    if (object.key == share.dialect->common_object()) object.content = content_hash(*common);
  }
}

void plan_locally(PlannedShare& planned, const RequestView& asked) {
  SaveShare& share = planned.share;
  check_options(*asked.options);
  share.options = *asked.options;  // now including what only this rank uses
  set_state(share, *asked.state);
  check_items(share, *planned.location);
  planned.replicas = replicas_to_name(share);
  share.local = make_local_plan(share.items);
  if (share.options.by_files->torch_rank_local) {
    share.assignment = all_that_is_held(share.local);
  } else {
    check_holders(share);
    if (share.options.copies.has_value()) note_contents_of_copied(share);
    share.assignment = plan_by_rule(share);
    limit_and_count_copies(share, planned.result);
    warn_of_undeclared(share);
  }
  // Only after planning, because the planner copies every common object whose content is noted.
  // Even if the ranks compare nothing: a restarted rank compares its state with its own receipt.
  note_contents(share, false);
  if (asked.compared != nullptr) note_compared(share, *asked.compared);
}

// ---- Joining

// Of a failure before any rank has begun: whether the others wait for this rank. They find out
// themselves that something else is at the location, where then nothing is left.
bool is_for_all(const SavingByFiles& saving, const Deadline& deadline) {
  if (saving.files.world_size == 1) return false;
  try {
    return join(saving.attempt, deadline);
  } catch (const Error& error) {
    return error.code() != ErrorCode::kAlreadyExists;
  }
}

// Ends the save for all its ranks, whether or not one has begun it. Returns false if it was
// published, or is complete, or if that is unknown.
bool end_all(SavingByFiles& saving, const Error& error) noexcept {
  saving.claim.reset();
  Storage& location = *saving.planned.location;
  const Deadline soon = Deadline::after(kFailureTime);
  try {
    const auto begun = read_head(location, saving.attempt.id());
    if (begun && meeting_of(location, *begun).missing(false).empty()) return false;
    // What this rank has reported, now or before a restart, is whole without it.
    if (begun && receipt_of(saving.attempt, saving.files.rank)) return false;
    if (!begun && !is_for_all(saving, soon)) return false;
    return end_failed(saving.attempt, error, soon);
  } catch (...) {
    log(LogLevel::kWarning,
        std::string("the other ranks of a save can't be notified of this rank's failure: ") +
            current_error().what());
    return false;
  }
}

// No lease: each rank would have to renew one.
void make_claim(SavingByFiles& saving) {
  if (saving.planned.location->facts().claims_are_leases()) return;
  std::string name = attempt_receipt_name(saving.attempt.head, saving.files.rank);
  name.resize(name.rfind('.'));
  saving.claim.emplace(saving.planned.location, name.append(kClaimSuffix));
}

// Joins the attempt, and makes the claim that shows that this rank is working. Returns the receipt
// of this rank that counts already, if it is still there.
std::optional<Receipt> join(SavingByFiles& saving) {
  const Attempt& attempt = saving.attempt;
  const int rank = saving.files.rank;
  saving.is_done = !join(attempt, saving.deadline);
  const bool leaves_receipts = !saving.is_done || saving.files.torch_rank_local;
  auto left = leaves_receipts ? receipt_of(attempt, rank) : std::nullopt;
  saving.is_reported = left.has_value();
  if (left) return left;
  if (saving.is_done) return published_receipt_of(attempt, rank);
  make_claim(saving);
  return std::nullopt;
}

// Called if this rank's part was saved before.
void write_nothing(SavingByFiles& saving) {
  PlannedShare& planned = saving.planned;
  planned.share.assignment = {};
  planned.result.copies = planned.result.copy_bytes = 0;
  log(LogLevel::kWarning,
      "rank " + std::to_string(saving.files.rank) + ": nothing is written, because the save " +
          planned.result.save_id + " at " + planned.location->describe() + " was already " +
          (saving.is_done ? "published" : "written by this rank") +
          " under this token and number; use another number to save another state");
}

// ---- Writing and reporting

Receipt write_under_free_names(SavingByFiles& saving, KeptResources* kept) {
  const SaveOptions& options = saving.planned.share.options;
  int count = options.resources.files_per_rank;
  for (int tries = 1;; ++tries) {
    if (options.reuse) count *= 4;  // how many files the save makes is not known
    try {
      const int first = first_free_file(saving.attempt, saving.files.rank, count);
      return write_share(saving.planned, kept, saving.deadline, first);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kAlreadyExists || tries == kMaxNameTries) throw;
    }
  }
}

std::vector<std::string> unwritten_objects(const SaveShare& share) {
  std::vector<bool> written(share.local.objects.size(), false);
  for (const uint32_t i : share.assignment.objects) written[i] = true;
  std::vector<std::string> keys;
  for (size_t i = 0; i < written.size(); ++i) {
    const PlanObject& object = share.local.objects[i];
    if (!written[i] && !object.common) keys.push_back(object.key);
  }
  return keys;
}

AttemptReceipt left_by(const SavingByFiles& saving) {
  const SaveShare& share = saving.planned.share;
  AttemptReceipt left;
  left.receipt = saving.receipt->encode();
  std::set<std::string_view> common;
  for (const PlanObject& object : share.local.objects) {
    if (object.common) common.insert(object.key);
  }
  ByteWriter keys;
  for (const std::string_view key : common) keys.string(key);
  left.common_keys = xxh3_64(keys.bytes());
  left.held = held_contents(share.local);
  left.lists = share.lists;
  left.unwritten_objects = unwritten_objects(share);
  left.of_dialect = saving.of_dialect;
  left.replicas = saving.planned.replicas;
  return left;
}

// Another process has reported as this rank, and its receipt counts.
void withdraw_written(SavingByFiles& saving) {
  PlannedShare& planned = saving.planned;
  discard(planned);
  planned.result = {.save_id = planned.result.save_id};
  log(LogLevel::kWarning, "rank " + std::to_string(saving.files.rank) +
                              ": what this process has written is removed, because another "
                              "process has reported as this rank of the save " +
                              planned.result.save_id);
}

void refuse(bool refused, const std::string& what, const std::string& hint) {
  if (refused) throw Error(ErrorCode::kUnsupported, what).with_hint(hint);
}

}  // namespace

SavingByFiles::SavingByFiles(const Location& location, const SaveOptions& options, Deadline until)
    : files(checked(options).by_files.value()),
      deadline(until),
      attempt(location.shared()->until(until), head_of(options), files.rank) {
  planned.location = planned.storage = location.shared()->until(until);
  planned.result.save_id = attempt.head.save_id;
  SaveShare& share = planned.share;
  set_options(share, options);
  share.list_held = true;
  share.rank = files.rank;
  share.world_size = files.world_size;
  share.save_id = planned.result.save_id;
}

void plan_step(SavingByFiles& saving, const MadeRequest& request, SessionParts*) {
  refuse_by_files(saving.planned.share);
  std::optional<Receipt> before;
  try {
    plan_locally(saving.planned, expect_made(request));
    before = join(saving);
  } catch (...) {
    end_all(saving, current_error());
    throw;
  }
  if (!saving.is_done && !saving.is_reported) return;
  // The receipt that is there can still be published, whatever state this rank has now.
  if (before) expect_reported_state(*before, saving.planned.share);
  write_nothing(saving);
}

void write_step(SavingByFiles& saving, KeptResources* kept) noexcept {
  if (saving.is_done || saving.is_reported) return;
  const SaveShare& share = saving.planned.share;
  try {
    // Encode this now, while the tensors of the common state still have memory.
    if (share.rank == 0)
      saving.of_dialect = share.dialect->encode_index(share.items, *share.format);
    saving.receipt = write_under_free_names(saving, kept);
    saving.receipt->state = state_of(share);
    if (saving.files.torch_rank_local) saving.receipt->held.clear();  // each writes all that it has
  } catch (...) {
    saving.failed = std::current_exception();
    if (saving.planned.lazy != nullptr) saving.planned.lazy->end(saving.failed);
    discard(saving.planned);
    end_all(saving, current_error());
  }
}

void report_step(SavingByFiles& saving) {
  if (saving.failed) std::rethrow_exception(saving.failed);
  if (saving.is_done) return;
  const int rank = saving.files.rank;
  std::optional<Receipt> counts;  // instead of this process's
  try {
    if (saving.receipt) {
      counts = leave_receipt(saving.attempt, rank, left_by(saving), saving.deadline);
      if (counts) withdraw_written(saving);
      saving.is_reported = true;
    }
    saving.claim.reset();
  } catch (...) {
    saving.claim.reset();
    // Others can go on with a receipt. It may have been left although its call has failed: this
    // rank's files are unneeded only once the outcome says so.
    if (!saving.is_reported && end_all(saving, current_error())) discard(saving.planned);
    throw;
  }
  // Not a failure of the save: the receipt that counts can be published.
  if (counts) expect_same_receipt(*counts, *saving.receipt);
}

SaveResult publish_step(SavingByFiles& saving) {
  SaveResult& result = saving.planned.result;
  if (saving.is_done) return result;
  const int threads = saving.planned.share.options.resources.threads;
  try {
    result.published = publish_if_complete(saving.attempt, false, threads, saving.deadline);
    if (result.published || !saving.files.wait) return result;
    wait_published(saving.attempt, threads, saving.deadline);
  } catch (Error& error) {
    if (error.code() == ErrorCode::kCoverage && error.hint().empty()) {
      error.with_hint(
          "every rank that is declared to hold a tensor must have it; from Python, arrays that "
          "are not wrapped are declared to be on all ranks");
    }
    throw;
  }
  result.published = true;
  return result;
}

void give_up_save(SavingByFiles& saving, const Error& why) noexcept {
  if (saving.is_done || saving.is_reported || saving.failed) return;
  discard(saving.planned);
  end_all(saving, why);
}

void refuse_by_files(const SaveShare& share) {
  const SaveOptions& options = share.options;
  const Format& format = *share.format;
  const Dialect& dialect = *share.dialect;
  const bool rank_local = options.by_files->torch_rank_local;
  refuse(
      format.needs_grid() || format.has_fixed_names(),
      "the format " + std::string(format.name()) +
          " can't be saved without a communicator: its data files have fixed names, so two saves "
          "would write to the same files",
      "save with a communicator, or in the format torch_dist");
  refuse(dialect.shares_directory(),
         "the dialect " + std::string(dialect.name()) +
             " can't be saved without a communicator: another program writes a part of the "
             "checkpoint before and after the save",
         "save with a communicator, or save everything in the dialect megatron");
  refuse(rank_local && dialect.has_fixed_names(),
         "torch's rank-local mode does not support the dialect " + std::string(dialect.name()),
         "save in the dialect pytorch, or without torch_rank_local");
  refuse(rank_local && format.rank_index_name(0).empty(),
         "the format " + std::string(format.name()) + " has no rank-local checkpoints",
         "save in the format torch_dist");
  refuse(rank_local && options.copies.has_value(),
         "torch's rank-local mode does not support copies: each rank writes all that it holds",
         "save without copies");
  refuse(options.checks.access, "checks.access needs a communicator",
         "without it, elements that are missing or written twice are found at publishing");
}

}  // namespace tilestone::engine
