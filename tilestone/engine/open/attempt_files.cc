#include "tilestone/engine/open/attempt_files_internal.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <utility>

#include "tilestone/base/both_ways.h"
#include "tilestone/base/checksum.h"
#include "tilestone/base/size_text.h"
#include "tilestone/base/uuid.h"
#include "tilestone/comm/store_communicator.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/message_files_internal.h"
#include "tilestone/engine/open/sealed_internal.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/engine/run/terms_internal.h"
#include "tilestone/format/format.h"
#include "tilestone/format/known/known.h"

namespace tilestone::engine {
namespace {

constexpr size_t kNamedMissing = 8;
constexpr uint8_t kVersion = 1;
constexpr std::string_view kPublishedText = "published\n";
constexpr std::string_view kStoodText = "published, and its switch too\n";
constexpr std::string_view kAbandonedText = "abandoned\n";

std::string own(std::string_view save_id, std::string_view rest) {
  std::string name(kTilestoneDirectory);
  return name.append("/").append(save_id).append(rest);
}

struct DecodedOutcome {
  Outcome outcome;
  std::optional<Error> failure = {};
};
DecodedOutcome decode_outcome(ByteView bytes, const std::string& file) {
  if (as_text(bytes) == kPublishedText) return {Outcome::kPublished};
  if (as_text(bytes) == kStoodText) return {Outcome::kStands};
  if (as_text(bytes) == kAbandonedText) return {Outcome::kAbandoned};
  try {
    return {Outcome::kAbandoned, LeftFailure::decode(bytes, file).error};
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kCorrupt) throw;
  }
  throw Error(ErrorCode::kCorrupt, "the outcome of a save is damaged")
      .with_file(file)
      .with_hint(
          "if no rank of the save is alive, remove this file; then `tilestone publish` publishes "
          "the save, or `tilestone gc --abandon` ends it");
}

std::optional<DecodedOutcome> outcome_of(Storage& storage, const std::string& save_id) {
  const std::string name = outcome_name(save_id);
  const auto bytes = read_if_there(storage, name, kMaxSmallFile);
  return bytes ? std::optional(decode_outcome(*bytes, name)) : std::nullopt;
}

// A world of any size has groups, so that it is the same work for every rank but the last.
StoreCommunicator communicator_of(std::shared_ptr<MessageStore> store, const AttemptHead& head,
                                  int rank) {
  return {std::move(store), rank, head.world_size, {.most_names = 0, .removes = true}};
}

}  // namespace

// The id has the form of a UUID of version 8, the version for derived ids.
std::string save_id_of(std::string_view token, uint64_t number) {
  ByteWriter seed;
  seed.string("Tilestone save");
  seed.string(token);
  seed.u64(number);
  const uint64_t first = xxh3_64(seed.bytes());
  seed.u64(first);
  std::string hex = fmt::format("{:016x}{:016x}", first, xxh3_64(seed.bytes()));
  hex[12] = '8';
  hex[16] = "89ab"[hex[16] % 4];
  return hex.substr(0, 8) + "-" + hex.substr(8, 4) + "-" + hex.substr(12, 4) + "-" +
         hex.substr(16, 4) + "-" + hex.substr(20);
}

// ---- Names

std::string attempt_name(std::string_view save_id) { return own(save_id, ".attempt"); }
std::string outcome_name(std::string_view save_id) { return own(save_id, ".outcome"); }
std::string attempt_directory(std::string_view save_id) { return own(save_id, ""); }
std::string attempt_receipt_name(const AttemptHead& head, int rank) {
  return DurableMessages(nullptr, head.save_id)
      .file_of(communicator_of(nullptr, head, -1).name_of(rank));
}
std::string publisher_claim(std::string_view save_id) {
  return own(save_id, "/publisher" + std::string(kClaimSuffix));
}

std::string attempt_temporary(std::string_view save_id, std::string_view what) {
  return own(save_id, "/" + std::string(what) + "." + random_uuid() + ".tmp");
}

StoreCommunicator meeting_of(Storage& storage, const AttemptHead& head, int rank) {
  return communicator_of(
      std::make_shared<DurableMessages>(storage.shared_from_this(), head.save_id), head, rank);
}

// ---- Contents

namespace {

// As in base/both_ways.h.
void walk_head(auto& io, auto& head) {
  both::text(io, head.save_id);
  both::varint(io, head.world_size);
  both::expect(io, head.world_size >= 1 && head.world_size <= kMaxWorldSize,
               "the world size is not one of 1 to " + std::to_string(kMaxWorldSize));
  both::text(io, head.format);
  both::text(io, head.dialect);
  both::text(io, head.writer);
  both::one_of(io, head.common_differs, static_cast<uint8_t>(Checks::Differing::kError),
               "common_differs has an unknown value");
  both::u8(io, head.rank_local);
  both::u64(io, head.token);
  both::u64(io, head.number);
  both::text_map(io, head.attributes);
}

void walk_left(auto& io, auto& left) {
  both::u64(io, left.common_keys);
  both::each(io, left.held, 2 * sizeof(uint64_t) + 1, [&](auto& one) {
    both::u64(io, one.id);
    both::u64(io, one.content);
    both::varint(io, one.ranks);
  });
  walk_lists(io, left.lists);
  both::blob(io, left.receipt);
}

// Left out by a rank that has nothing of it.
void walk_rest_of_left(auto& io, auto& left) {
  both::texts(io, left.unwritten_objects);
  both::each(io, left.of_dialect, 3, [&](auto& file) {
    both::text(io, file.name);
    both::one_of(io, file.role, IndexRole::kAfter, "an index file has an unknown role");
    both::blob(io, file.bytes);
  });
  both::table(io, left.replicas, 2, [&](auto& rank) {
    both::varint(io, rank);
    both::expect(io, rank < kMaxReplicas, "a replica has an impossible rank");
  });
}

}  // namespace

Bytes AttemptHead::encode() const {
  ByteWriter out;
  out.u8(kVersion);
  walk_head(out, *this);
  return sealed(std::move(out));
}

AttemptHead AttemptHead::decode(ByteView bytes, const std::string& file) {
  return unsealed(bytes, file, kVersion, [](ByteReader& in) {
    AttemptHead head;
    walk_head(in, head);
    return head;
  });
}

Bytes AttemptReceipt::encode() const {
  ByteWriter out;
  out.u8(kVersion);
  walk_left(out, *this);
  const bool has_rest = !unwritten_objects.empty() || !of_dialect.empty() || !replicas.empty();
  if (has_rest) walk_rest_of_left(out, *this);
  return sealed(std::move(out));
}

AttemptReceipt AttemptReceipt::decode(ByteView bytes, const std::string& file) {
  return unsealed(bytes, file, kVersion, [](ByteReader& in) {
    AttemptReceipt left;
    walk_left(in, left);
    if (in.remaining() > 0) walk_rest_of_left(in, left);
    return left;
  });
}

Bytes LeftFailure::encode() const {
  ByteWriter out;
  out.u8(kVersion);
  out.blob(error.encode());
  return sealed(std::move(out));
}

LeftFailure LeftFailure::decode(ByteView bytes, const std::string& file) {
  return unsealed(bytes, file, kVersion,
                  [](ByteReader& in) { return LeftFailure{Error::decode(in.blob())}; });
}

// ---- Reading and deciding

std::optional<Bytes> read_if_there(Storage& storage, const std::string& name, uint64_t most) {
  try {
    return read_file(storage, name, most);
  } catch (const Error& error) {
    // ESTALE: another host has removed the file meanwhile (NFS).
    if (error.code() != ErrorCode::kNotFound && error.sys_errno() != ESTALE) throw;
    return std::nullopt;
  }
}

std::string how_to_read_without_attempt(const std::string& save_id) {
  return "remove " + attempt_name(save_id) + " and the directory " + attempt_directory(save_id) +
         ", and the rank-local checkpoint is read as if it had been copied here without its hidden "
         "files";
}

std::optional<AttemptHead> read_head(Storage& storage, const std::string& save_id) {
  const std::string name = attempt_name(save_id);
  try {
    const auto bytes = read_if_there(storage, name, kMaxSmallFile);
    if (!bytes) return std::nullopt;
    AttemptHead head = AttemptHead::decode(*bytes, name);
    if (head.save_id == save_id) return head;
    throw Error(ErrorCode::kCorrupt, "the file belongs to the save " + head.save_id)
        .with_file(name);
  } catch (Error& error) {
    if (error.code() == ErrorCode::kCorrupt) {
      error.with_hint(
          "`tilestone gc --abandon` ends the save. If each of its ranks has left its own metadata, "
          "it can be read instead: " +
          how_to_read_without_attempt(save_id));
    }
    throw;
  }
}

std::optional<Outcome> read_outcome(Storage& storage, const std::string& save_id) {
  const auto found = outcome_of(storage, save_id);
  return found ? std::optional(found->outcome) : std::nullopt;
}

std::optional<Error> read_failed(Storage& storage, const std::string& save_id) {
  auto found = outcome_of(storage, save_id);
  return found ? std::move(found->failure) : std::nullopt;
}

void note_switch(Storage& storage, const std::string& save_id, Deadline deadline) {
  if (read_outcome(storage, save_id) == Outcome::kStands) return;
  storage.publish(outcome_name(save_id), attempt_temporary(save_id, "outcome"),
                  as_bytes(kStoodText), true, deadline);
}

// ---- Saying what it is

std::string name_of_index(const AttemptHead& head) {
  return format_named(head.format)->encode_index({}).front().name;
}

std::optional<AttemptState> look_at_attempt(Storage& storage, const std::string& save_id) {
  AttemptState state;
  try {
    if (auto found = outcome_of(storage, save_id)) {
      state.outcome = found->outcome;
      state.failed = std::move(found->failure);
    }
    state.head = read_head(storage, save_id);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kCorrupt && error.code() != ErrorCode::kUnsupported) throw;
    state.damage = error.what();
    return state;
  }
  // A rank-local checkpoint can become an ordinary one, once.
  const bool stays =
      state.head && state.head->rank_local && !storage.stat(name_of_index(*state.head));
  if (state.outcome == Outcome::kStands && !stays) return std::nullopt;
  if (!state.head && is_published(state.outcome)) return std::nullopt;
  if (!state.head) return state;
  state.missing = meeting_of(storage, *state.head).missing(true);
  // It may have been published during the look.
  const bool is_gone = !state.missing.empty() && !storage.stat(attempt_name(save_id));
  if (is_gone && is_published(read_outcome(storage, save_id))) return std::nullopt;
  return state;
}

std::string attempt_text(const std::string& save_id, const AttemptState& state) {
  const std::string save = "the save " + save_id;
  if (state.outcome == Outcome::kAbandoned) {
    return save +
           (state.failed ? " has failed: " + std::string(state.failed->what()) : " was abandoned") +
           "; `tilestone gc --delete` removes its files";
  }
  if (!state.damage.empty()) return save + " is not published, and can't be: " + state.damage;
  if (!state.head) return save + " has only begun: its number of ranks is not known yet";
  const int world = state.head->world_size;
  const std::string ranks = std::to_string(world) + (world == 1 ? " rank" : " ranks");
  if (state.missing.empty()) {
    return save + " is not published yet, though all of its " + ranks +
           " have written; `tilestone publish` makes it the checkpoint, or says why that can't be";
  }
  const bool one = state.missing.size() == 1;
  return save + " is not published: " + std::to_string(state.missing.size()) + " of its " + ranks +
         (one ? " has" : " have") + " not written (" + ranks_text(state.missing, kNamedMissing) +
         (one ? "); it" : "); they") +
         " may still be writing, or save again under the same token; if " +
         (one ? "it is" : "they are") + " dead, `tilestone gc --abandon` ends the save";
}

std::string unpublished_text(Storage& storage, const std::set<std::string>& saves) {
  std::vector<std::string> texts;
  for (const std::string& save_id : saves) {
    try {
      const auto state = look_at_attempt(storage, save_id);
      if (state) texts.push_back(attempt_text(save_id, *state));
    } catch (const Error& error) {
      texts.push_back("the save " + save_id + " is not published, and can't be: " + error.what());
    }
  }
  if (texts.size() < 2) return texts.empty() ? "" : texts.front();
  return texts.front() + "; `tilestone publish --list` shows " + std::to_string(texts.size() - 1) +
         " more";
}

Outcome decide(Storage& storage, const std::string& save_id,
               const std::variant<Outcome, Error>& wanted, Deadline deadline) {
  const Error* const failed = std::get_if<Error>(&wanted);
  const bool publishes = !failed && std::get<Outcome>(wanted) == Outcome::kPublished;
  const ByteView text = as_bytes(publishes ? kPublishedText : kAbandonedText);
  const Bytes mine = failed ? LeftFailure{*failed}.encode() : Bytes(text.begin(), text.end());
  DurableMessages messages(storage.shared_from_this(), save_id);
  const Bytes counts = tilestone::decide(messages, kOutcomeMessage, mine, deadline);
  return decode_outcome(counts, outcome_name(save_id)).outcome;
}

}  // namespace tilestone::engine
