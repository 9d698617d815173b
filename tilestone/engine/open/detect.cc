#include "tilestone/engine/open/detect_internal.h"

#include <algorithm>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/open/attempt_files_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/look_around_internal.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/megatron_mark.h"

namespace tilestone::engine {
namespace {

// Those of all names that list_of_checkpoint() lists.
std::vector<std::string> identifying(std::vector<std::string> names) {
  if (contains_name(names, kMegatronConfig)) return names;
  std::erase_if(names, [](const std::string& name) {
    return !in_tilestone_directory(name) && name.find('/') != std::string::npos;
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
  Listing at_once = storage.listing("", Depth::kAtOnce);
  if (at_once.is_whole) return identifying(std::move(at_once.files));
  const std::vector<std::string> own = storage.list(std::string(kTilestoneDirectory) + "/");
  std::vector<std::string> names = storage.list_files();
  if (contains_name(names, kMegatronConfig)) return storage.list();
  names.insert(names.end(), own.begin(), own.end());
  std::sort(names.begin(), names.end());
  return names;
}

bool looks_like_checkpoint(std::span<const std::string> names) {
  const std::vector<std::shared_ptr<const Format>> formats = known_formats();
  return std::any_of(formats.begin(), formats.end(),
                     [&](const auto& format) { return format->detect(names); });
}

// Saves without a communicator whose index may be published in part: in dialects with fixed names.
// nullopt: one of them has ended since the names were listed.
std::optional<std::vector<AttemptHead>> attempts_of_fixed_names(
    Storage& storage, std::span<const std::string> names) {
  std::vector<AttemptHead> saves;
  if (!looks_like_checkpoint(names)) return saves;
  for (const std::string& name : names) {
    const auto own = parse_in_tilestone_directory(name);
    if (!own || name != attempt_name(own->save_id)) continue;
    try {
      auto head = read_head(storage, own->save_id);
      if (!head) return std::nullopt;
      if (!dialect_named(head->dialect)->has_fixed_names()) continue;
      if (!format_named(head->format)->detect(names)) continue;
      if (!is_published(read_outcome(storage, own->save_id))) continue;
      saves.push_back(*std::move(head));
    } catch (const Error& error) {
      // A damaged or unknown attempt must not make a checkpoint unreadable.
      if (error.code() != ErrorCode::kCorrupt && error.code() != ErrorCode::kUnsupported) throw;
    }
  }
  return saves;
}

struct PartOfIndex {
  std::string save_id;
  std::vector<std::string> files;  // the existing files of its index
};
std::optional<PartOfIndex> part_among(Storage& storage, std::span<const std::string> names,
                                      const std::vector<AttemptHead>& saves) {
  for (const AttemptHead& save : saves) {
    const auto format = format_named(save.format);
    const DirectoryFiles files = read_index(storage, *format, nullptr, names);
    if (format->parse_index(files).save_id != save.save_id) continue;
    PartOfIndex part{save.save_id, format->index_files(names)};
    for (std::string& name : dialect_named(save.dialect)->index_files(names)) {
      part.files.push_back(std::move(name));
    }
    return part;
  }
  return std::nullopt;
}

struct CheckpointNames {
  std::vector<std::string> names;
  std::optional<PartOfIndex> part;  // its files are not among `names`
};
// nullopt: an attempt has ended since the names were listed.
std::optional<CheckpointNames> without_part(Storage& storage, std::vector<std::string> names) {
  CheckpointNames found{std::move(names), std::nullopt};
  if (contains_name(found.names, kMegatronConfig)) return found;
  const auto saves = attempts_of_fixed_names(storage, found.names);
  if (!saves) return std::nullopt;
  found.part = part_among(storage, found.names, *saves);
  if (found.part) found.names = without(std::move(found.names), found.part->files);
  return found;
}

// Among the names that `list` returns.
template <typename List>
CheckpointNames look_among(Storage& storage, const List& list) {
  for (int i = 0;; ++i) {
    std::vector<std::string> names = list();
    if (contains_name(names, kRemovedName)) {
      std::erase_if(names, [](const std::string& name) { return !in_tilestone_directory(name); });
    }
    if (auto found = without_part(storage, names)) return *std::move(found);
    if (i == kMaxOverwrites) return {std::move(names), std::nullopt};
  }
}

// `at_once`: if not empty, what Depth::kAtOnce has listed.
CheckpointNames look_for_checkpoint(Storage& storage, std::vector<std::string> at_once = {}) {
  return look_among(storage, [&] {
    return at_once.empty() ? list_of_checkpoint(storage) : identifying(std::exchange(at_once, {}));
  });
}

bool is_of_attempt(const std::string& name) {
  const std::string_view kind = kind_of(name);
  return kind == kAttemptKind || kind == kOutcomeKind;
}

// All names. Where an attempt has left a trace, in the order of list_of_checkpoint(): its switch
// may be missing among names that were listed just before it ended. The trace, its outcome, stays.
std::vector<std::string> list_all(Storage& storage) {
  std::vector<std::string> names = storage.list();
  if (std::none_of(names.begin(), names.end(), is_of_attempt)) return names;
  const std::vector<std::string> own = storage.list(std::string(kTilestoneDirectory) + "/");
  names = storage.list();
  std::erase_if(names, in_tilestone_directory);
  names.insert(names.end(), own.begin(), own.end());
  std::sort(names.begin(), names.end());
  return names;
}

// A listing may lag, as a file server's client shows it: where it has files of a save and no
// switch, the switch may have come since. Then they are no leftovers, so it is asked for by name.
void add_late_switch(Storage& storage, std::vector<std::string>& names) {
  if (std::ranges::none_of(names, is_own_name) || looks_like_checkpoint(names)) return;
  for (const std::string& name : {std::string(".metadata"), std::string(kMegatronConfig)}) {
    const auto info = storage.stat(name);
    if (!info || !info->regular) continue;
    names.insert(std::ranges::lower_bound(names, name), name);
  }
}

}  // namespace

std::vector<std::string> names_at(Storage& storage) {
  std::vector<std::string> names = list_all(storage);
  add_late_switch(storage, names);
  return names;
}

bool is_saved_to(Storage& storage) {
  try {
    return storage.is_claimed(std::string(kLockName));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
    return false;
  }
}

namespace {

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

}  // namespace

DetectedFormat detect(Storage& storage, std::span<const std::string> names) {
  return detect_format(names,
                       [&](const std::string& name) { return read_file(storage, name, kAnySize); });
}

DetectedFormat detect_as(Storage& storage, const std::shared_ptr<const Format>& wanted,
                         std::span<const std::string> names) {
  DetectedFormat found = detect(storage, names);
  if (wanted->detect(names)) found.format = wanted;
  if (found.format && !found.dialect) found.dialect = pytorch_dialect();
  return found;
}

std::vector<std::string> without(std::vector<std::string> names,
                                 const std::vector<std::string>& others) {
  std::erase_if(names, [&](const std::string& name) {
    return std::find(others.begin(), others.end(), name) != others.end();
  });
  return names;
}

namespace {

// Reads the parts of a file that the format needs.
FileParts read_parts(Storage& storage, const Format& format, const std::string& name) {
  const auto file = storage.open(name);
  FileParts read{file->size(), {}};
  while (const auto next = format.next_part(name, read)) {
    if (next->offset > read.size || next->size > read.size - next->offset ||
        read.parts.contains(next->offset)) {
      throw Error(ErrorCode::kInternal, "a format asks for a part that it can't get")
          .with_file(name);
    }
    Bytes bytes(next->size);
    const ReadOp op{file.get(), next->offset, next->size, bytes.data()};
    if (next->size > 0) storage.read({&op, 1}, {}, [](size_t, ByteView) {});
    read.parts.emplace(next->offset, std::move(bytes));
  }
  return read;
}

}  // namespace

DirectoryFiles read_index(Storage& storage, const Format& format, const Dialect* dialect,
                          std::span<const std::string> names, const FilesRead& read) {
  DirectoryFiles files;
  std::vector<std::string> wanted = format.index_files(names);
  if (dialect != nullptr) {
    for (std::string& name : dialect->index_files(names)) wanted.push_back(std::move(name));
  }
  for (const std::string& name : wanted) {
    if (files.contents.contains(name)) continue;
    const auto known = read.find(name);
    files.contents.emplace(
        name, known != read.end() ? known->second : read_file(storage, name, kAnySize));
  }
  for (const std::string& name : format.sized_files(names)) {
    const auto info = storage.stat(name);
    if (!info) throw Error(ErrorCode::kNotFound, "a listed file no longer exists").with_file(name);
    if (info->regular) files.sizes.emplace(name, info->size);
  }
  for (const std::string& name : format.self_describing_files(names)) {
    files.parts.emplace(name, read_parts(storage, format, name));
  }
  for (const auto& [name, bytes] : files.contents) files.names.push_back(name);
  for (const auto& [name, size] : files.sizes) files.names.push_back(name);
  for (const auto& [name, parts] : files.parts) files.names.push_back(name);
  std::sort(files.names.begin(), files.names.end());
  files.names.erase(std::unique(files.names.begin(), files.names.end()), files.names.end());
  return files;
}

Standing look_at(Storage& storage, const std::shared_ptr<const Format>& wanted) {
  const auto read = [&](const std::string& name) { return read_file(storage, name, kAnySize); };
  Standing here;
  CheckpointNames found = look_among(storage, [&] {
    here.names = names_at(storage);
    return identifying(here.names);
  });
  here.notes = read_notes(storage, here.names);
  here.remains = remains_of_index(storage, here.names, here.notes);
  const auto remains = [&](const std::string& name) { return here.remains.contains(name); };
  here.of_checkpoint = std::move(found.names);
  std::erase_if(here.names, remains);
  std::erase_if(here.of_checkpoint, remains);
  here.found = detect_as(storage, wanted, here.of_checkpoint);
  here.is_removed = contains_name(here.names, kRemovedName);
  if (!here.is_removed) here.foreign = find_foreign(here.names, read);
  return here;
}

std::vector<std::string> names_of_checkpoint(Storage& storage, std::vector<std::string> at_once) {
  return look_for_checkpoint(storage, std::move(at_once)).names;
}

DetectedFormat find_format(Storage& storage, const std::shared_ptr<const Format>& wanted,
                           std::span<const std::string> names) {
  FilesRead read;
  DetectedFormat found = detect_readable(names, [&](const std::string& name) {
    return read[name] = read_file(storage, name, kAnySize);
  });
  found.read = std::move(read);
  if (wanted != nullptr) {
    found.format = wanted;
    if (found.dialect == nullptr) found.dialect = pytorch_dialect();
  }
  if (found.format != nullptr) return found;
  expect_no_index_lost(storage, names);
  Error error(ErrorCode::kNotFound, "no checkpoint at " + storage.describe());
  error.with_reason(Reason::kNoCheckpoint);
  const Notes notes = read_notes(storage, names);
  const auto lost = find_lost(storage, names, notes);
  // While a save is under way, these files may belong to it.
  if (contains_name(names, kRemovedName)) {
    error.with_hint(kRemovedHint);
  } else if (lost && !is_saved_to(storage)) {
    error.with_hint(lost->what + "; " + lost->hint);
  } else if (const std::string unpublished = unpublished_text(storage, notes.attempts);
             !unpublished.empty()) {
    error.with_hint(unpublished);
  } else if (!is_saved_to(storage)) {
    error.with_hint(look_around(storage, names));
  }
  throw std::move(error);
}

std::optional<std::string> partly_published_by(Storage& storage) {
  const auto part = look_for_checkpoint(storage).part;
  return part ? std::optional(part->save_id) : std::nullopt;
}

bool any_checkpoint(Storage& storage, const Format& also) {
  const std::vector<std::string> names = names_of_checkpoint(storage);
  return also.detect(names) || detect(storage, names).format != nullptr;
}

}  // namespace tilestone::engine
