#include "tilestone/engine/open/attempt_files_internal.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <utility>

#include "tilestone/base/checksum.h"
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

Bytes AttemptHead::encode() const {
  ByteWriter out;
  out.u8(kVersion);
  out.string(save_id);
  out.varint(static_cast<uint64_t>(world_size));
  out.string(format);
  out.string(dialect);
  out.string(writer);
  out.u8(common_differs);
  out.u8(rank_local ? 1 : 0);
  out.u64(token);
  out.u64(number);
  out.varint(attributes.size());
  for (const auto& [name, value] : attributes) {
    out.string(name);
    out.string(value);
  }
  return sealed(std::move(out));
}

AttemptHead AttemptHead::decode(ByteView bytes, const std::string& file) {
  return unsealed(bytes, file, kVersion, [](ByteReader& in) {
    AttemptHead head;
    head.save_id = in.string();
    const uint64_t world = in.varint();
    if (world < 1 || world > kMaxWorldSize) {
      in.fail("the world size is " + std::to_string(world) + ", not one of 1 to " +
              std::to_string(kMaxWorldSize));
    }
    head.world_size = static_cast<int>(world);
    head.format = in.string();
    head.dialect = in.string();
    head.writer = in.string();
    head.common_differs = in.u8();
    if (head.common_differs > static_cast<uint8_t>(Checks::Differing::kError)) {
      in.fail("common_differs has an unknown value");
    }
    head.rank_local = in.u8() != 0;
    head.token = in.u64();
    head.number = in.u64();
    for (uint64_t count = in.count(2); count > 0; --count) {
      std::string name(in.string());
      head.attributes.emplace(std::move(name), in.string());
    }
    return head;
  });
}

Bytes AttemptReceipt::encode() const {
  ByteWriter out;
  out.u8(kVersion);
  out.u64(common_keys);
  out.varint(held.size());
  for (const HeldContent& one : held) {
    out.u64(one.id);
    out.u64(one.content);
    out.varint(one.ranks);
  }
  write_lists(out, lists);
  out.blob(receipt);
  if (!unwritten_objects.empty() || !of_dialect.empty() || !replicas.empty()) {
    out.varint(unwritten_objects.size());
    for (const std::string& key : unwritten_objects) out.string(key);
    out.varint(of_dialect.size());
    for (const IndexFile& file : of_dialect) {
      out.string(file.name);
      out.u8(static_cast<uint8_t>(file.role));
      out.blob(file.bytes);
    }
    out.varint(replicas.size());
    for (const auto& [key, rank] : replicas) {
      out.string(key);
      out.varint(rank);
    }
  }
  return sealed(std::move(out));
}

namespace {

Index decode_index_files(ByteReader& in) {
  Index index(in.count(3));
  for (IndexFile& file : index) {
    file.name = in.string();
    const uint8_t role = in.u8();
    if (role > static_cast<uint8_t>(IndexRole::kAfter))
      in.fail("an index file has an unknown role");
    file.role = static_cast<IndexRole>(role);
    const ByteView bytes = in.blob();
    file.bytes.assign(bytes.begin(), bytes.end());
  }
  return index;
}

}  // namespace

AttemptReceipt AttemptReceipt::decode(ByteView bytes, const std::string& file) {
  return unsealed(bytes, file, kVersion, [](ByteReader& in) {
    AttemptReceipt left;
    left.common_keys = in.u64();
    left.held.resize(in.count(2 * sizeof(uint64_t) + 1));
    for (HeldContent& one : left.held) {
      one.id = in.u64();
      one.content = in.u64();
      one.ranks = static_cast<uint32_t>(std::min<uint64_t>(in.varint(), UINT32_MAX));
    }
    left.lists = read_lists(in);
    const ByteView receipt = in.blob();
    left.receipt.assign(receipt.begin(), receipt.end());
    if (in.remaining() == 0) return left;
    left.unwritten_objects.resize(in.count());
    for (std::string& key : left.unwritten_objects) key = in.string();
    left.of_dialect = decode_index_files(in);
    for (size_t more = in.count(2); more > 0; --more) {
      std::string key(in.string());
      const uint64_t rank = in.varint();
      if (rank >= kMaxReplicas)
        in.fail("a replica has the impossible rank " + std::to_string(rank));
      left.replicas.emplace(std::move(key), static_cast<uint32_t>(rank));
    }
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
