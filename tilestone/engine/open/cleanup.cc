#include <algorithm>
#include <iterator>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/base/or_log.h"
#include "tilestone/engine/open/attempt_files_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/message_files_internal.h"
#include "tilestone/format/data_file_name.h"
#include "tilestone/format/format.h"
#include "tilestone/format/manifest.h"
#include "tilestone/format/megatron_mark.h"

namespace tilestone::engine {
namespace {

constexpr size_t kSaveIdLength = 36;
constexpr std::string_view kTemporarySuffix = ".tmp";
constexpr uint64_t kMaxNoteBytes = 1u << 20;
constexpr uint64_t kMaxNamesBytes = 1u << 30;  // of the files of a conversion to zarr

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_hex(char c) { return is_digit(c) || (c >= 'a' && c <= 'f'); }

bool has_all_files(Storage& storage, const Manifest& manifest) {
  for (const Receipt& receipt : manifest.receipts) {
    for (const ReceiptFile& file : receipt.files) {
      const auto info = storage.stat(file.name);
      if (!info || !info->regular || info->size != file.size) return false;
    }
  }
  return true;
}

// Whether this is a save without a communicator that can still be published, so that it is not a
// lost checkpoint.
bool is_unpublished(std::span<const std::string> names, const Notes& notes,
                    const std::string& save_id) {
  if (!notes.attempts.contains(save_id) || notes.abandoned.contains(save_id)) return false;
  if (notes.undecided.contains(save_id)) return true;
  return std::find(names.begin(), names.end(), attempt_name(save_id)) != names.end();
}

bool is_file(Storage& storage, const std::string& name) {
  const auto info = storage.stat(name);
  return info && info->regular;
}

// The manifest of this save, if it is intact and all data files that it names exist.
std::optional<Manifest> complete_save(Storage& storage, const std::string& save_id) {
  try {
    const std::string name = manifest_name(save_id);
    Manifest manifest = Manifest::decode(read_file(storage, name, UINT64_MAX), name);
    if (manifest.save_id == save_id && has_all_files(storage, manifest)) return manifest;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kIo) throw;  // whether the save is complete is not known
  }
  return std::nullopt;
}

// The name of the index's switch.
std::string switch_of(const Manifest& manifest) {
  for (const IndexSum& sum : manifest.index) {
    if (sum.role == IndexRole::kSwitch) return sum.name;
  }
  return "index";
}

// Whether the save was ended before it had published its switch, which is a temporary file until
// then.
bool has_temporary_switch(std::span<const std::string> names, const Manifest& manifest) {
  const std::string temporary = temporary_of(manifest.save_id, switch_of(manifest));
  return std::find(names.begin(), names.end(), temporary) != names.end();
}

Bytes encode_note(const std::set<std::string>& names) {
  ByteWriter writer;
  writer.varint(names.size());
  for (const std::string& name : names) writer.string(name);
  return std::move(writer).take();
}

std::set<std::string> decode_note(ByteView bytes, const std::string& name) {
  if (bytes.empty()) return {};  // it names none, or its save was killed while it wrote the note
  ByteReader reader(bytes, name);
  std::set<std::string> names;
  for (uint64_t count = reader.count(); count > 0; --count) names.emplace(reader.string());
  reader.expect_end();
  return names;
}

LostCheckpoint lost_index(const Storage& storage, const Manifest& manifest) {
  return {manifest.save_id,
          false,
          "the checkpoint of the save " + manifest.save_id + " has lost only its " +
              switch_of(manifest) + ": its manifest and all its data files are in " +
              storage.describe(),
          {}};
}

LostCheckpoint lost_hidden(const Storage& storage, const std::string& save_id) {
  return {save_id,
          false,
          "data files of the save " + save_id + " are in " + storage.describe() +
              " without the hidden files (.metadata, " + std::string(kTilestoneDirectory) +
              ") of their checkpoint",
          {}};
}

}  // namespace

bool is_save_id(std::string_view text) {
  if (text.size() != kSaveIdLength) return false;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool dash = i == 8 || i == 13 || i == 18 || i == 23;
    if (dash ? text[i] != '-' : !is_hex(text[i])) return false;
  }
  return true;
}

std::string note_name(std::string_view save_id) {
  std::string name(kTilestoneDirectory);
  return name.append("/").append(save_id).append(".begun");
}

void leave_note(Storage& storage, const std::string& save_id, const std::set<std::string>& names,
                Deadline deadline) {
  const std::string name = note_name(save_id);
  try {
    const Bytes note = names.empty() ? Bytes() : encode_note(names);
    if (!storage.put(name, note, Condition::absent(), temporary_name(save_id, "begun"), deadline)) {
      throw Error(ErrorCode::kAlreadyExists, "a save of this id has begun here").with_file(name);
    }
  } catch (...) {
    remove_files(storage, std::vector{name});
    throw;
  }
}

std::string fixed_names_of(std::string_view save_id) { return temporary_name(save_id, "files"); }

void leave_fixed_names(Storage& storage, const std::string& save_id,
                       const std::set<std::string>& names, Deadline deadline) {
  storage.publish(fixed_names_of(save_id), temporary_name(save_id, "names"), encode_note(names),
                  false, deadline);
}

void Notes::add(const std::string& save_id, const std::set<std::string>& names) {
  begun.insert(save_id);
  for (const std::string& noted : names) {
    (noted.ends_with(save_id) ? begun : replaces[save_id]).insert(noted);
  }
}

std::set<std::string> Notes::open(bool has_checkpoint) const {
  if (has_checkpoint) return undecided;
  std::set<std::string> saves;
  std::set_difference(attempts.begin(), attempts.end(), abandoned.begin(), abandoned.end(),
                      std::inserter(saves, saves.end()));
  return saves;
}

std::set<std::string> Notes::ended(const std::string& existing, bool is_rank_local) const {
  std::set<std::string> saves = begun;
  // For another writer's checkpoint `existing` is "" too. Then the files of all attempts that are
  // not abandoned stay.
  const bool has_checkpoint = !existing.empty() && !is_rank_local;
  for (const std::string& save_id : open(has_checkpoint)) saves.erase(save_id);
  const auto found = replaces.find(existing);
  if (found != replaces.end()) saves.insert(found->second.begin(), found->second.end());
  return saves;
}

namespace {

std::optional<Manifest> manifest_if_intact(Storage& storage, const std::string& name) {
  try {
    return Manifest::decode(read_file(storage, name, UINT64_MAX), name);
  } catch (const Error& error) {
    log(LogLevel::kDebug, std::string("a manifest can't be read: ") + error.what());
    return std::nullopt;
  }
}

// The data files that a manifest names; none if it can't be read.
std::vector<std::string> data_files_of(Storage& storage, const std::string& manifest) {
  std::vector<std::string> files;
  const auto decoded = manifest_if_intact(storage, manifest);
  if (!decoded) return files;
  for (const Receipt& receipt : decoded->receipts) {
    for (const ReceiptFile& file : receipt.files) files.push_back(file.name);
  }
  return files;
}

// A damaged outcome, which is logged, counts as none: the save's files stay.
std::optional<Outcome> outcome_if_intact(Storage& storage, const std::string& save_id) {
  try {
    return read_outcome(storage, save_id);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kCorrupt) throw;
    log(LogLevel::kWarning,
        std::string("a save's outcome can't be read, so its files stay: ") + error.what());
    return std::nullopt;
  }
}

}  // namespace

Notes read_notes(Storage& storage, std::span<const std::string> names) {
  Notes notes;
  for (const std::string& name : names) {
    const auto own = parse_in_tilestone_directory(name);
    if (!own || own->kind == kManifestKind) continue;
    notes.begun.insert(own->save_id);
    // If only an outcome is left, the attempt has ended.
    if (own->kind == kAttemptKind) notes.attempts.insert(own->save_id);
    const bool has_files = name == fixed_names_of(own->save_id);
    if (own->kind != kNoteKind && !has_files) continue;
    try {
      const uint64_t most = has_files ? kMaxNamesBytes : kMaxNoteBytes;
      std::set<std::string> noted = decode_note(read_file(storage, name, most), name);
      if (!has_files) {
        notes.add(own->save_id, noted);
      } else if (!contains_name(names, kMegatronConfig)) {
        std::erase_if(noted, [](const std::string& file) {
          return in_tilestone_directory(file) || parse_tilestone_name(file);
        });
        notes.fixed_names.merge(noted);
      }
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kNotFound) continue;  // the note was removed meanwhile
      if (error.code() == ErrorCode::kIo) notes.unread.insert(name);
      log(LogLevel::kWarning,
          std::string("a save's note can't be read, so the files that it names stay: ") +
              error.what());
    }
  }
  for (const std::string& save_id : notes.attempts) {
    const auto outcome = outcome_if_intact(storage, save_id);
    if (!outcome) notes.undecided.insert(save_id);
    if (outcome == Outcome::kAbandoned) notes.abandoned.insert(save_id);
  }
  return notes;
}

std::set<std::string> recorded_saves(Storage& storage, std::span<const std::string> names) {
  std::set<std::string> saves;
  for (const std::string& name : names) {
    const auto own = parse_in_tilestone_directory(name);
    if (!own || (own->kind != kManifestKind && own->kind != kAttemptKind)) continue;
    saves.insert(own->save_id);
    if (own->kind != kManifestKind) continue;
    for (const std::string& file : data_files_of(storage, name)) {
      if (const auto data = parse_tilestone_name(file)) saves.insert(data->noted);
    }
  }
  return saves;
}

bool in_tilestone_directory(std::string_view name) {
  return name.starts_with(std::string(kTilestoneDirectory) + "/");
}

std::string temporary_name(std::string_view save_id, std::string_view what) {
  std::string name(kTilestoneDirectory);
  name.append("/").append(save_id).append(".").append(what).append(kTemporarySuffix);
  return name;
}

std::string temporary_of(std::string_view save_id, std::string_view file) {
  const std::string_view last = file.substr(file.rfind('/') + 1);
  return temporary_name(save_id, last.substr(std::min(last.find_first_not_of('.'), last.size())));
}

std::optional<TilestoneName> parse_in_tilestone_directory(std::string_view name) {
  if (!in_tilestone_directory(name)) return std::nullopt;
  const std::string_view base = name.substr(kTilestoneDirectory.size() + 1);
  const std::string save_id(base.substr(0, kSaveIdLength));
  if (!is_save_id(save_id)) return std::nullopt;
  if (name == manifest_name(save_id)) return TilestoneName{kManifestKind, save_id, save_id};
  if (name == note_name(save_id)) return TilestoneName{kNoteKind, save_id, save_id};
  if (name == outcome_name(save_id)) return TilestoneName{kOutcomeKind, save_id, save_id};
  if (name == attempt_name(save_id) || name.starts_with(attempt_directory(save_id) + "/")) {
    return TilestoneName{kAttemptKind, save_id, save_id};
  }
  if (is_message_suffix(base.substr(kSaveIdLength))) {
    return TilestoneName{kReceiptKind, save_id, save_id};
  }
  if (!base.substr(kSaveIdLength).starts_with('.') || !base.ends_with(kTemporarySuffix)) {
    return std::nullopt;
  }
  return TilestoneName{kTemporaryKind, save_id, save_id};
}

std::optional<TilestoneName> parse_tilestone_name(std::string_view name) {
  if (auto own = parse_in_tilestone_directory(name)) return own;
  const auto parts = parse_data_file_name(name);
  if (!parts) return std::nullopt;
  // SaveOptions::separation_hint may stand before the save id.
  const std::string& id = parts->save_id;
  if (id.find('/') != std::string::npos || id.starts_with('.')) return std::nullopt;
  std::string own = id.substr(id.size() - std::min(id.size(), kSaveIdLength));
  if (!is_save_id(own)) return std::nullopt;
  return TilestoneName{kDataKind, std::move(own), id};
}

bool is_own_name(std::string_view name) { return parse_tilestone_name(name).has_value(); }

std::string_view kind_of(std::string_view name) {
  const auto own = parse_tilestone_name(name);
  return own ? own->kind : std::string_view();
}

bool is_leftover(const TilestoneName& own, const std::set<std::string>& ended) {
  if (own.kind == kOutcomeKind) return false;
  return own.kind == kNoteKind || own.kind == kTemporaryKind || ended.contains(own.noted);
}

std::vector<std::string> leftovers(std::span<const std::string> names,
                                   const std::set<std::string>& referenced, const Notes& notes,
                                   const std::set<std::string>& ended) {
  std::vector<std::string> found;
  for (const std::string& name : names) {
    if (referenced.contains(name) || notes.unread.contains(name)) continue;
    const auto own = parse_tilestone_name(name);
    if (own && is_leftover(*own, ended)) found.push_back(name);
  }
  return found;
}

std::optional<LostCheckpoint> find_lost(Storage& storage, std::span<const std::string> names,
                                        const Notes& notes) {
  if (contains_name(names, kRemovedName)) return std::nullopt;
  for (const std::string& name : names) {
    const auto own = parse_tilestone_name(name);
    if (!own || is_unpublished(names, notes, own->save_id)) continue;
    const bool began_here = notes.begun.contains(own->save_id);
    std::optional<LostCheckpoint> lost;
    if (own->kind == kManifestKind) {
      const auto manifest = complete_save(storage, own->save_id);
      if (manifest && !has_temporary_switch(names, *manifest)) {
        lost = lost_index(storage, *manifest);
      }
    } else if (own->kind == kDataKind && !began_here && is_file(storage, name)) {
      lost = lost_hidden(storage, own->save_id);
    }
    if (!lost) continue;
    lost->began_here = began_here;
    lost->hint =
        "copy the checkpoint once more with its hidden files (cp -a FROM/. TO), if it still exists "
        "elsewhere";
    return lost;
  }
  return std::nullopt;
}

void remove_remains(Storage& storage, const Remains& remains) {
  std::vector<std::string> others;
  for (const auto& [name, tag] : remains) {
    if (tag.empty()) {
      others.push_back(name);
    } else {
      storage.remove_if(name, tag, Deadline::never());
    }
  }
  storage.remove(others);
}

Remains remains_of_index(Storage& storage, std::span<const std::string> names, const Notes& notes) {
  Remains remains;
  for (const std::string& name : notes.fixed_names) {
    if (contains_name(names, name)) remains.emplace(name, "");
  }
  for (const std::string& save_id : notes.begun) {
    const std::string name = manifest_name(save_id);
    if (notes.attempts.contains(save_id) || !contains_name(names, name)) continue;
    const auto manifest = manifest_if_intact(storage, name);
    if (!manifest || contains_name(names, switch_of(*manifest)) ||
        !has_temporary_switch(names, *manifest)) {
      continue;
    }
    for (const IndexSum& sum : manifest->index) {
      if (is_own_name(sum.name) || !contains_name(names, sum.name)) continue;
      const auto info = storage.stat(sum.name);  // before it is read
      const auto bytes = read_if_there(storage, sum.name);
      const bool is_its = bytes && bytes->size() == sum.size && xxh3_64(*bytes) == sum.xxh3;
      if (is_its && info) remains.emplace(sum.name, info->tag);
    }
  }
  return remains;
}

bool remove_files(Storage& storage, std::span<const std::string> names) {
  return or_log(LogLevel::kWarning, "an unneeded file could not be removed",
                [&] { storage.remove(names); });
}

void remove_leftover_files(Storage& storage, std::span<const std::string> names) {
  std::vector<std::string> files, notes;
  std::set<std::string> directories;  // of the files
  for (const std::string& name : names) {
    const std::string_view kind = kind_of(name);
    const bool is_note = kind == kNoteKind || kind == kTemporaryKind;
    (is_note ? notes : files).push_back(name);
    const size_t slash = name.rfind('/');
    if (!is_note) directories.insert(slash == std::string::npos ? "" : name.substr(0, slash));
  }
  if (!remove_files(storage, files)) return;
  // A note covers its save's files in each of them. It goes only once they are durably removed.
  for (const std::string& directory : directories) storage.settle(directory);
  remove_files(storage, notes);
}

}  // namespace tilestone::engine
