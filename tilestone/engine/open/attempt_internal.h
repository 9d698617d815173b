// An attempt: a save without a communicator, as the files say it that its ranks leave for one
// another. The protocol stands in engine/commit/attempt.cc; here are names and contents.
//
//   .tilestone/SAVE_ID.attempt       what all its ranks have agreed on by coming to it
//   .tilestone/SAVE_ID/GROUP/RANK.lease    changes while the rank works
//   .tilestone/SAVE_ID/GROUP/RANK.report   what the rank has written; never replaced
//   .tilestone/SAVE_ID/GROUP/merged        those of all the group's ranks, which then may go
//   .tilestone/SAVE_ID/publisher     changes while somebody publishes
//   .tilestone/SAVE_ID/failed        the first error of a rank, until a restarted one takes it back
//   .tilestone/SAVE_ID.outcome       published or abandoned; made once, and it stays. Of a
//                                    published one it says in the end that its switch stood
//
// Ranks lie in groups of about the root of their number, so that no directory of an attempt has
// more than a few hundred entries in a world of 65,536.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/deadline.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/open/tp_replicas_internal.h"
#include "tilestone/format/index.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// The save id of the `number`-th save under this token: the same text on every rank, and another
// one for another token or number.
std::string save_id_of(std::string_view token, uint64_t number);

// What the ranks of an attempt must say alike. The first that comes writes it down.
struct AttemptHead {
  std::string save_id;
  int world_size = 1;
  std::string format;
  std::string dialect;
  std::string writer;          // "Tilestone 0.1.0"
  uint8_t common_differs = 0;  // SaveOptions::Differing
  bool rank_local = false;     // ByFiles::torch_rank_local
  // Of which token, as a hash of it, and the how manyth: ByFiles::number.
  uint64_t token = 0;
  uint64_t number = 0;
  std::map<std::string, std::string> attributes = {};

  int group_size() const;   // ranks of a group; the last group may have less
  int group_count() const;  // groups 0, 1, ...
  int group_of(int rank) const { return rank / group_size(); }
  int group_begin(int group) const { return group * group_size(); }
  int group_end(int group) const;

  Bytes encode() const;
  static AttemptHead decode(ByteView bytes, const std::string& file);
  friend bool operator==(const AttemptHead&, const AttemptHead&) = default;
};

enum class Outcome : uint8_t { kPublished, kAbandoned };

std::string attempt_name(std::string_view save_id);
std::string outcome_name(std::string_view save_id);
// The directory of everything else, and what lies in it.
std::string attempt_directory(std::string_view save_id);
std::string group_directory(std::string_view save_id, int group);
std::string group_name(std::string_view save_id, int group);
std::string report_name(const AttemptHead& head, int rank);
std::string lease_name(const AttemptHead& head, int rank);
std::string failed_name(std::string_view save_id);
std::string publisher_name(std::string_view save_id);
// A name in the attempt's directory through which `what` is published: no other call's.
std::string attempt_temporary(std::string_view save_id, std::string_view what);
// The same in a group's directory, for what each of its ranks makes.
std::string group_temporary(std::string_view save_id, int group, std::string_view what);
// The save that a name below kOwnDirectory belongs to, where it is one of an attempt's files.
std::optional<std::string> parse_attempt_name(std::string_view name);

// What one rank leaves.
struct LeftReport {
  Bytes report;                  // RankReport::encode()
  uint64_t common_keys = 0;      // hash of the keys of its common objects, which rank 0 writes
  uint64_t common_contents = 0;  // hash of what they are; 0: not to be compared
  // Objects that the rank has and another rank is to write.
  std::vector<std::string> unwritten_objects = {};
  Index of_dialect = {};       // of rank 0: the dialect's files of the index, made of what it saves
  ReplicaNames replicas = {};  // SaveOptions::tp_replica_names: what this rank holds

  Bytes encode() const;
  static LeftReport decode(ByteView bytes, const std::string& file);  // Error(kCorrupt)
};

// The first error of a rank. `rank` left it; the error may name another one, or none.
struct LeftFailure {
  int rank = 0;
  Error error;

  Bytes encode() const;
  static LeftFailure decode(ByteView bytes, const std::string& file);  // Error(kCorrupt)
};

// The reports of a group's ranks in their order, each as LeftReport::encode() gave it.
Bytes encode_group(const std::vector<Bytes>& left);
std::vector<Bytes> decode_group(ByteView bytes, const std::string& file);  // Error(kCorrupt)

// nullopt: not there (yet). Error(kCorrupt) says what can be done about one that is damaged.
std::optional<AttemptHead> read_head(Storage& storage, const std::string& save_id);
std::optional<Outcome> read_outcome(Storage& storage, const std::string& save_id);
// Whether its checkpoint has stood there: the outcome alone may be that of a save whose switch came
// second. And what its publisher does to say so once the switch is durable.
bool has_stood(Storage& storage, const std::string& save_id);
void note_stood(Storage& storage, const std::string& save_id, Deadline deadline);
// A damaged one gives the error that says so.
std::optional<Error> read_failed(Storage& storage, const std::string& save_id);

// What an attempt's files say.
struct AttemptState {
  std::optional<Outcome> outcome;
  size_t missing_count = 0;  // ranks that have left no report
  std::vector<int> missing;  // the lowest of them
  std::optional<Error> failed;
  bool is_late = false;  // another checkpoint has come first; known where the caller has looked
};
// `names`: how many missing ranks are named. `exists` says whether a file of the attempt is there.
AttemptState look_at(Storage& storage, const AttemptHead& head, size_t names,
                     const std::function<bool(const std::string&)>& exists);
// What such a save is, and what can be done about it, as a sentence. `world_size`: 0 where the
// attempt has no head. `state` has all missing ranks, or as many as are to be named.
std::string attempt_text(const std::string& save_id, int world_size, const AttemptState& state);
// The same of those among `saves` that are no checkpoint yet, "" where there is none: of the first,
// and how many others there are. `names`: the location's, sorted; nothing is listed once more.
std::string unpublished_text(Storage& storage, std::span<const std::string> names,
                             const std::set<std::string>& saves);

// Makes the outcome, unless there is one; the one that counts. Durable when it returns.
Outcome decide(Storage& storage, const std::string& save_id, Outcome wanted, Deadline deadline);

// The file's bytes; nullopt where it is not there. Error(kCorrupt) where it has more than `most`.
std::optional<Bytes> read_if_there(Storage& storage, const std::string& name,
                                   uint64_t most = UINT64_MAX);
// Bytes of a head, an outcome, a failure or a lease; reports have no limit.
inline constexpr uint64_t kMaxSmallFile = 4u << 20;

}  // namespace tilestone::engine
