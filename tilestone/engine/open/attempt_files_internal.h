// An attempt is a save without a communicator. Its ranks coordinate through files. This header
// declares the names and contents of the files; engine/commit/attempt.cc describes the protocol.
//
//   .tilestone/SAVE_ID.attempt             the head: the terms on which all ranks agree
//   .tilestone/SAVE_ID/GROUP/RANK.report   what the rank has written; never replaced
//   .tilestone/SAVE_ID/GROUP/RANK.claim    locked while the rank works
//   .tilestone/SAVE_ID/GROUP/joiner        the number of the rank that begins to make the next
//   .tilestone/SAVE_ID/GROUP/merged        all receipts of the group, which are then removed
//   .tilestone/SAVE_ID/publisher.claim     locked while a process publishes
//   .tilestone/SAVE_ID.outcome             published, abandoned, or the error with which it has
//                                          failed; made once, and never removed. It also records
//                                          in the end that the switch was published
//
// A group has about as many ranks as the square root of the world size. So no directory of an
// attempt has more than a few hundred entries in a world of 65,536 ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/deadline.h"
#include "tilestone/base/error.h"
#include "tilestone/comm/store_communicator.h"
#include "tilestone/engine/open/tp_replicas_internal.h"
#include "tilestone/format/index.h"
#include "tilestone/plan/contents.h"
#include "tilestone/state/list_lengths.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// The save id of the `number`-th save under this token: the same on every rank, and different for
// any other token or number.
std::string save_id_of(std::string_view token, uint64_t number);

// The terms on which the ranks of an attempt must agree. The first rank that joins writes them.
struct AttemptHead {
  std::string save_id;
  int world_size = 1;
  std::string format;
  std::string dialect;
  std::string writer;          // "Tilestone 0.1.0"
  uint8_t common_differs = 0;  // Checks::Differing
  bool rank_local = false;     // ByFiles::torch_rank_local
  uint64_t token = 0;          // hash of ByFiles::token
  uint64_t number = 0;         // ByFiles::number
  std::map<std::string, std::string> attributes = {};

  Bytes encode() const;
  static AttemptHead decode(ByteView bytes, const std::string& file);
  friend bool operator==(const AttemptHead&, const AttemptHead&) = default;
};

// A save that has failed is an abandoned one, too. kStands: its switch was published as well. The
// outcome kPublished alone is not enough: another save's switch may have been published first.
enum class Outcome : uint8_t { kPublished, kStands, kAbandoned };
inline bool is_published(std::optional<Outcome> outcome) {
  return outcome && *outcome != Outcome::kAbandoned;
}

std::string attempt_name(std::string_view save_id);
std::string outcome_name(std::string_view save_id);
// The directory of the attempt's other files, and the names in it.
std::string attempt_directory(std::string_view save_id);
std::string attempt_receipt_name(const AttemptHead& head, int rank);
inline constexpr std::string_view kClaimSuffix = ".claim";
std::string publisher_claim(std::string_view save_id);
// A name in the attempt's directory for the temporary file through which `what` is published. It is
// different in each call.
std::string attempt_temporary(std::string_view save_id, std::string_view what);

// How the ranks of an attempt meet: their receipts are a gather, the outcome is a verdict. The
// messages are durable. `rank`: -1 for a process that leaves no receipt.
StoreCommunicator meeting_of(Storage& storage, const AttemptHead& head, int rank = -1);

// The content of a rank's receipt file.
struct AttemptReceipt {
  Bytes receipt;             // Receipt::encode()
  uint64_t common_keys = 0;  // hash of the keys of its common objects, which rank 0 writes
  // What it holds, by id, with the contents that the ranks compare (plan/contents.h).
  std::vector<HeldContent> held = {};
  std::vector<ListLength> lists = {};  // of its state
  // Keys of objects that this rank has and another rank must write.
  std::vector<std::string> unwritten_objects = {};
  Index of_dialect = {};       // from rank 0 only: the dialect's files of the index
  ReplicaNames replicas = {};  // SaveOptions::tp_replica_names: the replicas that this rank holds

  Bytes encode() const;
  static AttemptReceipt decode(ByteView bytes, const std::string& file);  // Error(kCorrupt)
};

// The content of the outcome of a save that has failed.
struct LeftFailure {
  Error error;

  Bytes encode() const;
  static LeftFailure decode(ByteView bytes, const std::string& file);  // Error(kCorrupt)
};

// nullopt if the file does not exist (yet). If the head is damaged, the hint of Error(kCorrupt)
// says what can be done.
std::optional<AttemptHead> read_head(Storage& storage, const std::string& save_id);
// A hint: how to read a rank-local checkpoint whose attempt has damaged files.
std::string how_to_read_without_attempt(const std::string& save_id);
std::optional<Outcome> read_outcome(Storage& storage, const std::string& save_id);
// Makes kPublished kStands. Called by the publisher once the switch is durable.
void note_switch(Storage& storage, const std::string& save_id, Deadline deadline);
// The error with which it has failed; nullopt: it was published, abandoned, or has no outcome.
std::optional<Error> read_failed(Storage& storage, const std::string& save_id);

// Of the index that makes an ordinary checkpoint: the first file.
std::string name_of_index(const AttemptHead& head);

// The state of an attempt according to its files, each of which is looked up by its name.
struct AttemptState {
  std::optional<AttemptHead> head;  // nullopt: it is damaged, or not there
  std::optional<Outcome> outcome = std::nullopt;
  std::optional<Error> failed = std::nullopt;
  std::string damage = {};        // the error of head or outcome, which can't be read
  std::vector<int> missing = {};  // the ranks that have left no receipt
};
// nullopt: there is nothing left to publish.
std::optional<AttemptState> look_at_attempt(Storage& storage, const std::string& save_id);
// The state of the save and what can be done about it, as a sentence.
std::string attempt_text(const std::string& save_id, const AttemptState& state);
// The same for the first of `saves` that is not published yet, and how many others there are; "" if
// all are published.
std::string unpublished_text(Storage& storage, const std::set<std::string>& saves);

// Makes the outcome unless there is one: kPublished, kAbandoned, or why it has failed. Returns the
// outcome that counts, which is then durable.
Outcome decide(Storage& storage, const std::string& save_id,
               const std::variant<Outcome, Error>& wanted, Deadline deadline);

// The file's bytes; nullopt if it does not exist. Error(kCorrupt) if it has more than `most` bytes.
std::optional<Bytes> read_if_there(Storage& storage, const std::string& name,
                                   uint64_t most = UINT64_MAX);
// The limit for a head or an outcome, bytes. Receipts have no limit.
inline constexpr uint64_t kMaxSmallFile = 4u << 20;

}  // namespace tilestone::engine
