#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/open/attempt_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/opening_internal.h"
#include "tilestone/engine/open/rank_local_internal.h"
#include "tilestone/engine/open/tp_replicas_internal.h"
#include "tilestone/format/megatron_mark.h"

namespace tilestone::engine {
namespace {

constexpr uint64_t kAnySize = UINT64_MAX;  // no limit, because the file exists and has that size
constexpr int kMaxOverwrites = 8;          // overwrites tolerated while one description is read
constexpr int kMaxExchanges = 3;           // likewise, exchanges of the directory

std::shared_ptr<const Format> format_or(std::string_view name,
                                        const std::shared_ptr<const Format>& wanted) {
  return wanted != nullptr ? wanted : format_named(name);
}

DetectedFormat detect(Storage& storage, std::span<const std::string> names) {
  return detect_format(names,
                       [&](const std::string& name) { return read_file(storage, name, kAnySize); });
}

std::vector<std::string> without(std::vector<std::string> names,
                                 const std::vector<std::string>& others) {
  std::erase_if(names, [&](const std::string& name) {
    return std::find(others.begin(), others.end(), name) != others.end();
  });
  return names;
}

// The names that identify a checkpoint. Lists subdirectories only if there is a metadata.json,
// beside which arrays may have directories of their own. So a large tree without a checkpoint is
// not walked, and unreadable directories in it do no harm.
//
// Tilestone's own names are listed first. An attempt ends by publishing its switch at the top level
// and then removing its head, so in this order either the head or the switch is seen.
std::vector<std::string> list_of_checkpoint(Storage& storage) {
  const std::vector<std::string> own = storage.list(std::string(kOwnDirectory) + "/");
  std::vector<std::string> names = storage.list_files();
  if (contains_name(names, kMegatronConfig)) return storage.list();
  names.insert(names.end(), own.begin(), own.end());
  std::sort(names.begin(), names.end());
  return names;
}

// Reads the files that the format and the dialect need, among these names.
DirectoryFiles read_index(Storage& storage, const Format& format, const Dialect* dialect,
                          std::span<const std::string> names) {
  DirectoryFiles files;
  std::vector<std::string> wanted = format.index_files(names);
  if (dialect != nullptr) {
    for (std::string& name : dialect->index_files(names)) wanted.push_back(std::move(name));
  }
  for (const std::string& name : wanted) {
    if (!files.contents.contains(name)) {
      files.contents.emplace(name, read_file(storage, name, kAnySize));
    }
  }
  for (const std::string& name : format.sized_files(names)) {
    const auto info = storage.stat(name);
    if (!info) throw Error(ErrorCode::kNotFound, "a listed file no longer exists").with_file(name);
    if (info->regular) files.sizes.emplace(name, info->size);
  }
  for (const auto& [name, bytes] : files.contents) files.names.push_back(name);
  for (const auto& [name, size] : files.sizes) files.names.push_back(name);
  std::sort(files.names.begin(), files.names.end());
  files.names.erase(std::unique(files.names.begin(), files.names.end()), files.names.end());
  return files;
}

bool looks_like_checkpoint(std::span<const std::string> names) {
  const std::vector<std::shared_ptr<const Format>> formats = known_formats();
  return std::any_of(formats.begin(), formats.end(),
                     [&](const auto& format) { return format->detect(names); });
}

// Saves without a communicator that may have claimed the location: in dialects with fixed names.
// nullopt: one of them has ended since the names were listed.
std::optional<std::vector<AttemptHead>> possible_claims(Storage& storage,
                                                        std::span<const std::string> names) {
  std::vector<AttemptHead> saves;
  if (!looks_like_checkpoint(names)) return saves;
  for (const std::string& name : names) {
    const auto own = parse_in_own_directory(name);
    if (!own || name != attempt_name(own->save_id)) continue;
    try {
      auto head = read_head(storage, own->save_id);
      if (!head) return std::nullopt;
      if (!dialect_named(head->dialect)->has_fixed_names()) continue;
      if (!format_named(head->format)->detect(names)) continue;
      if (read_outcome(storage, own->save_id) != Outcome::kPublished) continue;
      saves.push_back(*std::move(head));
    } catch (const Error& error) {
      // A damaged or unknown attempt must not make a checkpoint unreadable.
      if (error.code() != ErrorCode::kCorrupt && error.code() != ErrorCode::kUnsupported) throw;
    }
  }
  return saves;
}

struct Claim {
  std::string save_id;
  std::vector<std::string> files;  // the existing files of its index
};
std::optional<Claim> claim_among(Storage& storage, std::span<const std::string> names,
                                 const std::vector<AttemptHead>& saves) {
  for (const AttemptHead& save : saves) {
    const auto format = format_named(save.format);
    const DirectoryFiles files = read_index(storage, *format, nullptr, names);
    if (format->parse_index(files).save_id != save.save_id) continue;
    Claim claim{save.save_id, format->index_files(names)};
    for (std::string& name : dialect_named(save.dialect)->index_files(names)) {
      claim.files.push_back(std::move(name));
    }
    return claim;
  }
  return std::nullopt;
}

struct CheckpointNames {
  std::vector<std::string> names;
  std::optional<Claim> claim;  // its files are not among `names`
};
CheckpointNames look_for_checkpoint(Storage& storage) {
  for (int i = 0;; ++i) {
    CheckpointNames found{list_of_checkpoint(storage), std::nullopt};
    if (contains_name(found.names, kMegatronConfig)) return found;
    const auto saves = possible_claims(storage, found.names);
    if (!saves && i < kMaxOverwrites) continue;
    if (saves) found.claim = claim_among(storage, found.names, *saves);
    if (found.claim) found.names = without(std::move(found.names), found.claim->files);
    return found;
  }
}

std::vector<std::string> names_of_checkpoint(Storage& storage) {
  return look_for_checkpoint(storage).names;
}

// The content of kReplacedName, if it is about the save of the existing index and lists every
// rank-local file.
std::optional<Replaced> check_note(Storage& storage, const Format& format,
                                   std::span<const std::string> names) {
  Replaced replaced = Replaced::decode(read_file(storage, std::string(kReplacedName), kAnySize));
  const std::vector<std::string> rank_local = format.rank_local_files(names);
  const std::vector<std::string> others = without({names.begin(), names.end()}, rank_local);
  if (!format.detect(others)) return std::nullopt;
  const DirectoryFiles files = read_index(storage, format, nullptr, others);
  if (format.parse_index(files).save_id != replaced.save_id) return std::nullopt;
  for (const std::string& name : rank_local) {
    const auto found = replaced.files.find(name);
    if (found == replaced.files.end()) return std::nullopt;
    if (xxh3_64(read_file(storage, name, kAnySize)) != found->second) return std::nullopt;
  }
  return replaced;
}

// The name of the manifest that may belong to the index: that of the save that the index names. If
// the index names no save, the only manifest that exists.
std::optional<std::string> manifest_of(const Metadata& metadata,
                                       std::span<const std::string> names) {
  if (may_have_manifest(metadata.save_id)) return manifest_name(metadata.save_id);
  std::optional<std::string> only;
  if (!metadata.save_id.empty()) return only;
  for (const std::string& name : names) {
    const auto own = parse_in_own_directory(name);
    if (!own || own->kind != kManifestKind) continue;
    if (only) return std::nullopt;
    only = name;
  }
  return only;
}

// The content of kReplacedName, if the file exists and is valid for these names.
std::optional<Replaced> replaced_of(Storage& storage, const Format& format,
                                    std::span<const std::string> names) {
  if (!storage.stat(std::string(kReplacedName))) return std::nullopt;
  return check_note(storage, format, names);
}

// An index that can't be parsed may look like one of another writer. If a manifest lists a file of
// it with the same size and another checksum, the file is damaged: Error(kCorrupt), which also says
// what parsing found (`error`).
void expect_unchanged(Storage& storage, const DirectoryFiles& files,
                      std::span<const std::string> names, const Error& error) {
  for (const std::string& name : names) {
    const auto own = parse_in_own_directory(name);
    if (!own || own->kind != kManifestKind) continue;
    std::vector<IndexSum> sums;
    try {
      sums = Manifest::decode(read_file(storage, name, kAnySize), name).index;
    } catch (const Error&) {
      continue;  // the error of the index says more
    }
    for (const IndexSum& sum : sums) {
      const auto found = files.contents.find(sum.name);
      if (found == files.contents.end() || found->second.size() != sum.size) continue;
      if (xxh3_64(found->second) == sum.xxh3) continue;
      throw Error(ErrorCode::kCorrupt,
                  "the file has changed since it was saved: " + error.message())
          .with_file(sum.name);
    }
  }
}

// Reads the index among these names, and its manifest if there is one.
Description read_once(Storage& storage, const DetectedFormat& found,
                      std::vector<std::string> names) {
  if (replaced_of(storage, *found.format, names)) {
    const std::vector<std::string> rank_local = found.format->rank_local_files(names);
    names = without(std::move(names), rank_local);
  }
  const bool rank_local = is_rank_local(*found.format, names);
  if (rank_local) expect_all_ranks(storage, *found.format, names);
  Description description;
  description.format = found.format->name();
  description.dialect = found.dialect->name();
  description.files = read_index(storage, *found.format, found.dialect.get(), names);
  try {
    description.metadata = found.format->parse_index(description.files);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsafe) {
      expect_unchanged(storage, description.files, names, error);
    }
    throw;
  }
  if (rank_local) {
    // Ignores a manifest of this save: it belongs to an ordinary index that is not published yet.
    expect_no_other_ranks(storage, *found.format, names, *description.metadata);
    return description;
  }
  const auto manifest = manifest_of(*description.metadata, names);
  if (!manifest) return description;
  try {
    description.manifest = read_file(storage, *manifest, kAnySize);
    description.manifest_file = *manifest;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kNotFound) throw;
  }
  return description;
}

bool lacks_manifest(const Description& description) {
  const Metadata& metadata = *description.metadata;
  return !metadata.rank_local && !metadata.files.empty() && is_own_name(metadata.files.front()) &&
         description.manifest.empty();
}

bool same_files(const Description& a, const Description& b) {
  return a.files.contents == b.files.contents && a.files.sizes == b.files.sizes &&
         a.manifest == b.manifest;
}

// "" for a dialect that this version does not know.
std::string_view mark_of(const std::string& dialect) {
  for (const auto& known : known_dialects()) {
    if (known->name() == dialect) return known->mark();
  }
  return "";
}

// A checkpoint whose switch is missing or damaged may look like one of another dialect.
void check_dialect(const Opened& opened, const Manifest& manifest) {
  if (manifest.dialect == opened.dialect->name()) return;
  const auto last = std::find_if(manifest.index.begin(), manifest.index.end(),
                                 [](const IndexSum& s) { return s.role == IndexRole::kSwitch; });
  Error error(ErrorCode::kCorrupt, "the checkpoint was saved in the dialect " + manifest.dialect +
                                       ", but the file that says so is missing or damaged");
  const std::string_view mark = mark_of(manifest.dialect);
  if (!mark.empty()) {
    error.with_file(std::string(mark));  // whether Tilestone or another program writes it
  } else if (last != manifest.index.end()) {
    error.with_file(last->name);
  }
  throw std::move(error).with_hint("the save may have been interrupted before it was published");
}

// Attaches the manifest to the metadata. If the index names no save, the manifest may belong to a
// checkpoint that another writer has overwritten; then it is ignored.
void take_manifest(Opened& opened, ByteView bytes) {
  std::string& save_id = opened.metadata.save_id;
  const bool named = !save_id.empty();
  const std::string name = named ? manifest_name(save_id) : std::string(kOwnDirectory);
  Manifest manifest = Manifest::decode(bytes, name);
  if (named && manifest.save_id != save_id) {
    throw Error(ErrorCode::kCorrupt, "the manifest belongs to the save " + manifest.save_id)
        .with_file(name);
  }
  if (named) check_dialect(opened, manifest);
  try {
    check_index(manifest, opened.files);
  } catch (Error& error) {
    // Then files with fixed names may be a mixture of two saves.
    if (opened.format->has_fixed_names()) {
      error.with_hint(
          std::string("if another program has saved a complete checkpoint here since, remove ") +
          std::string(kOwnDirectory) + " to read it");
      throw;
    }
    if (named) throw;
    return;
  }
  save_id = manifest.save_id;
  attach_manifest(opened.metadata, manifest);
  opened.manifest = std::move(manifest);
}

// Whether a save is known to be under way.
bool is_saved_to(Storage& storage) {
  try {
    return storage.is_locked(std::string(kLockName));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
    return false;
  }
}

// Moves the common state's object out of the metadata, because it is not an object of the user.
void take_common(Opened& opened) {
  const std::string_view key = opened.dialect->common_object();
  if (key.empty() || opened.metadata.find_object(key) == nullptr) return;
  std::vector<StoredObject>& objects = opened.metadata.objects;
  const auto found = std::find_if(objects.begin(), objects.end(),
                                  [&](const StoredObject& object) { return object.key == key; });
  opened.common = std::move(*found);
  objects.erase(found);
  opened.metadata.index();
}

// Megatron-Core's and Tilestone's saves write metadata.json last, and removals take it away first.
// So if the index of the format that it names does not exist, the index was lost.
void expect_no_index_lost(Storage& storage, std::span<const std::string> names) {
  const auto read = [&](const std::string& name) { return read_file(storage, name, kAnySize); };
  const auto megatron = find_megatron_mark(names, read);
  if (!megatron || is_saved_to(storage)) return;
  if (!storage.stat(std::string(kMegatronConfig))) return;  // a removal has begun
  for (const auto& format : known_formats()) {
    if (format->name() != megatron->backend) continue;
    throw Error(ErrorCode::kCorrupt, "the index of the checkpoint at " + storage.describe() +
                                         " is missing; this file says that its format is " +
                                         megatron->backend)
        .with_file(std::string(kMegatronConfig))
        .with_hint("copy the checkpoint once more, if it still exists elsewhere");
  }
}

// The format and dialect of the checkpoint. `wanted` overrides the detected format.
DetectedFormat find_format(Storage& storage, const std::shared_ptr<const Format>& wanted,
                           std::span<const std::string> names) {
  DetectedFormat found = detect(storage, names);
  if (wanted != nullptr) {
    found.format = wanted;
    if (found.dialect == nullptr) found.dialect = pytorch_dialect();
  }
  if (found.format != nullptr) return found;
  expect_no_index_lost(storage, names);
  Error error(ErrorCode::kNotFound, "no checkpoint at " + storage.describe());
  const Notes notes = read_notes(storage, names);
  const auto lost = find_lost(storage, names, notes);
  // While a save is under way, these files may belong to it.
  if (lost && !is_saved_to(storage)) {
    error.with_hint(lost->what + "; " + lost->hint);
  } else if (const std::string unpublished = unpublished_text(storage, names, notes.attempts);
             !unpublished.empty()) {
    error.with_hint(unpublished);
  }
  throw std::move(error);
}

// A save that has replaced a checkpoint removes the old manifest. So an index without a manifest
// may be outdated, and is read again until two reads are equal.
Description read_description(Storage& storage, const DetectedFormat& detected,
                             std::vector<std::string> names) {
  Description found = read_once(storage, detected, std::move(names));
  for (int i = 0; i < kMaxOverwrites && lacks_manifest(found); ++i) {
    Description next = read_once(storage, detected, names_of_checkpoint(storage));
    const bool same = same_files(next, found);
    found = std::move(next);
    if (same) break;
  }
  return found;
}

// Describes the part of a rank-local checkpoint that one rank has written. nullopt if this rank has
// no metadata, or the checkpoint is not rank-local.
std::optional<Description> describe_rank_alone(Storage& storage, const DetectedFormat& found,
                                               std::span<const std::string> names, int rank) {
  const Format& format = *found.format;
  const std::string name = format.rank_index_name(rank);
  if (name.empty() || !is_rank_local(format, names) || !contains_name(names, name)) {
    return std::nullopt;
  }
  expect_all_ranks(storage, format, names);
  Description description;
  description.format = format.name();
  description.dialect = found.dialect->name();
  description.files.names.push_back(name);
  description.files.contents.emplace(name, read_file(storage, name, kAnySize));
  description.metadata = format.parse_rank_index(description.files, rank);
  expect_no_other_ranks(storage, format, names, *description.metadata);
  return description;
}

}  // namespace

std::optional<std::string> claimed_by(Storage& storage) {
  const auto claim = look_for_checkpoint(storage).claim;
  return claim ? std::optional(claim->save_id) : std::nullopt;
}

bool any_checkpoint(Storage& storage, const Format& also) {
  const std::vector<std::string> names = names_of_checkpoint(storage);
  return also.detect(names) || detect(storage, names).format != nullptr;
}

std::optional<Replaced> find_replaced(Storage& storage, const Format& format) {
  return replaced_of(storage, format, names_of_checkpoint(storage));
}

std::shared_ptr<Storage> hold(const std::shared_ptr<Storage>& storage) {
  try {
    return storage->held();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kNotFound) throw;
    return storage;
  }
}

// If a save exchanges the directory after it was held, the held files are removed. Then the new
// directory is tried.
Found find_checkpoint(const std::shared_ptr<Storage>& storage,
                      const std::shared_ptr<const Format>& wanted, std::optional<int> own_rank) {
  for (int i = 0;; ++i) {
    Found found{hold(storage), {}, {}, false};
    try {
      std::vector<std::string> names = names_of_checkpoint(*found.storage);
      found.format = find_format(*found.storage, wanted, names);
      if (own_rank) {
        auto own = describe_rank_alone(*found.storage, found.format, names, *own_rank);
        found.of_own_rank = own.has_value();
        if (own) found.description = *std::move(own);
        if (own) return found;
      }
      found.description = read_description(*found.storage, found.format, std::move(names));
      return found;
    } catch (const Error& error) {
      const bool may_be_gone = error.code() == ErrorCode::kNotFound && found.storage != storage;
      if (!may_be_gone || i == kMaxExchanges) throw;
    }
  }
}

void expect_same_checkpoint(Storage& storage, const Opened& opened) {
  if (!opened.format->has_fixed_names()) return;
  bool same = true;
  if (opened.manifest) {
    same = storage.stat(manifest_name(opened.manifest->save_id)).has_value();
  } else {
    for (const std::string& name : storage.list(std::string(kOwnDirectory) + "/")) {
      const auto own = parse_in_own_directory(name);
      same = same && !(own && own->kind == kManifestKind);
    }
  }
  if (same) return;
  throw Error(ErrorCode::kNotFound, "the checkpoint at " + storage.describe() +
                                        " is not the one that the coordinator (rank 0) has opened")
      .with_hint(
          "another save may have replaced the checkpoint since it was opened: open it again");
}

Opened open_description(Description description, const std::shared_ptr<const Format>& wanted,
                        SecondNames names) {
  Opened opened;
  opened.format = format_or(description.format, wanted);
  opened.dialect = dialect_named(description.dialect);
  opened.files = std::move(description.files);
  if (!description.metadata) description.metadata = opened.format->parse_index(opened.files);
  opened.metadata = std::move(*description.metadata);
  opened.metadata.dialect = opened.dialect->name();
  const bool may_have_second = opened.dialect->has_replica_names();
  if (may_have_second) opened.replica_names = take_replica_names(opened.metadata);
  if (!description.manifest.empty()) take_manifest(opened, description.manifest);
  take_common(opened);
  if (names == SecondNames::kUnited && may_have_second) {
    opened.replica_places = unite_tp_replicas(opened.metadata);
  }
  return opened;
}

Standing read_standing(Storage& storage, const std::shared_ptr<const Format>& wanted) {
  Standing standing;
  std::vector<std::string> names = names_of_checkpoint(storage);
  const bool as_wanted = wanted->detect(names);
  if (!as_wanted && detect(storage, names).format == nullptr) return standing;
  const DetectedFormat found = find_format(storage, as_wanted ? wanted : nullptr, names);
  const bool rank_local = is_rank_local(*found.format, names);
  Description description;
  try {
    description = read_description(storage, found, std::move(names));
  } catch (const Error& error) {
    if (!rank_local || error.code() != ErrorCode::kNotFound) throw;
    return standing;  // ranks are missing: the files belong to an incomplete save
  }
  const Metadata& metadata = *description.metadata;
  standing.found = true;
  standing.save_id = metadata.save_id;
  for (const auto& [name, bytes] : description.files.contents) {
    if (metadata.rank_local) standing.rank_local.insert(name);
    standing.index.insert(name);
  }
  standing.files.insert(metadata.files.begin(), metadata.files.end());
  if (description.manifest.empty()) return standing;
  standing.files.insert(description.manifest_file);
  // The index does not name the files that contain only copies.
  const Manifest manifest = Manifest::decode(description.manifest, description.manifest_file);
  for (const RankReport& report : manifest.reports) {
    for (const ReportedFile& file : report.files) standing.files.insert(file.name);
  }
  return standing;
}

Bytes Description::encode() const {
  ByteWriter writer;
  writer.string(format);
  writer.string(dialect);
  writer.blob(manifest);
  writer.varint(files.contents.size());
  for (const auto& [name, bytes] : files.contents) {
    writer.string(name);
    writer.blob(bytes);
  }
  writer.varint(files.sizes.size());
  for (const auto& [name, size] : files.sizes) {
    writer.string(name);
    writer.varint(size);
  }
  return std::move(writer).take();
}

Description Description::decode(ByteView bytes) {
  ByteReader reader(bytes, "description of a checkpoint");
  const auto owned = [](ByteView view) { return Bytes(view.begin(), view.end()); };
  Description description;
  description.format = reader.string();
  description.dialect = reader.string();
  description.manifest = owned(reader.blob());
  DirectoryFiles& files = description.files;
  for (uint64_t count = reader.count(2); count > 0; --count) {
    files.names.emplace_back(reader.string());
    files.contents.emplace(files.names.back(), owned(reader.blob()));
  }
  for (uint64_t count = reader.count(2); count > 0; --count) {
    files.names.emplace_back(reader.string());
    files.sizes.emplace(files.names.back(), reader.varint());
  }
  reader.expect_end();
  std::sort(files.names.begin(), files.names.end());
  return description;
}

Bytes Replaced::encode() const {
  ByteWriter writer;
  writer.string(save_id);
  writer.varint(files.size());
  for (const auto& [name, hash] : files) {
    writer.string(name);
    writer.u64(hash);
  }
  return std::move(writer).take();
}

Replaced Replaced::decode(ByteView bytes) {
  ByteReader reader(bytes, std::string(kReplacedName));
  Replaced replaced;
  replaced.save_id = reader.string();
  for (uint64_t count = reader.count(9); count > 0; --count) {
    std::string name(reader.string());
    replaced.files.emplace(std::move(name), reader.u64());
  }
  reader.expect_end();
  return replaced;
}

}  // namespace tilestone::engine
