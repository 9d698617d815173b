#include "tilestone/engine/commit/old_checkpoint_internal.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/commit/sibling_internal.h"
#include "tilestone/engine/open/attempt_files_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/description_internal.h"
#include "tilestone/format/manifest.h"

namespace tilestone::engine {
namespace {

bool has_fixed_names(const Format& format, const Dialect& dialect) {
  return format.has_fixed_names() || dialect.has_fixed_names();
}

// The saves without a communicator that may still become the checkpoint here. Beside an ordinary
// checkpoint, an attempt with the outcome "published" can't, and neither can one that the
// checkpoint's save has replaced. A rank-local checkpoint may still become an ordinary one, unless
// this save may replace it.
std::set<std::string> open_attempts(Storage& location, const Standing& here, bool overwrite) {
  const Notes& notes = here.notes;
  ExistingCheckpoint existing;
  try {
    existing = read_existing(location, here);
  } catch (const Error&) {
    return notes.open(here.found.format != nullptr);  // an unreadable one counts too
  }
  const bool rank_local = !existing.rank_local.empty();
  std::set<std::string> open = notes.open(existing.found && !rank_local);
  if (!existing.found) return open;
  if (rank_local && overwrite) open.erase(existing.save_id);
  const auto replaced = notes.replaces.find(existing.save_id);
  if (replaced == notes.replaces.end()) return open;
  for (const std::string& save_id : replaced->second) open.erase(save_id);
  return open;
}

// Such a save may still become the checkpoint here, and this save would make its files leftovers.
void refuse_open_attempts(Storage& location, const Standing& here, bool overwrite) {
  if (here.notes.attempts.empty()) return;
  const std::set<std::string> open = open_attempts(location, here, overwrite);
  if (open.empty()) return;
  throw Error(ErrorCode::kAlreadyExists, "the save " + *open.begin() + " at " +
                                             location.describe() +
                                             ", without a communicator, is not published yet")
      .with_file(attempt_name(*open.begin()))
      .with_hint(
          "`tilestone publish` completes it if all its ranks have written; `tilestone gc "
          "--abandon` ends it if they are dead");
}

// Of a save's copy of a file. In a file system, where such a checkpoint is a copy from an object
// store, a file of this name may also be what a killed save has begun to write.
bool is_whole(Storage& location, const std::string& save_id, const std::string& file,
              ByteView copy) {
  const std::string name = manifest_name(save_id);
  const auto manifest = read_if_there(location, name);
  if (!manifest) return false;
  const std::vector<IndexSum> sums = sums_in(*manifest, name);
  return std::ranges::any_of(sums, [&](const IndexSum& sum) {
    return sum.name == file && sum.size == copy.size() && sum.xxh3 == xxh3_64(copy);
  });
}

[[noreturn]] void fail_exists(const std::string& what, const std::string& file) {
  Error error(ErrorCode::kAlreadyExists, what);
  if (!file.empty()) error.with_file(file);
  throw error.with_reason(Reason::kCheckpointExists)
      .with_hint(Hint{{"save elsewhere, or replace it with ", "overwrite", "true"}});
}

}  // namespace

void expect_free(Storage& location, const Standing& here, const SaveTerms& terms) {
  if (here.is_removed) fail_under_way(location, "a removal", "try again when it has ended");
  refuse_open_attempts(location, here, terms.overwrite);
  if (const auto& other = here.foreign) {
    const std::string stands = other->kind + " exists at " + location.describe();
    if (!terms.overwrite) fail_exists(stands, other->mark);
    if (!other->replaceable && !terms.dialect->shares_directory()) {
      throw Error(ErrorCode::kUnsupported, stands + ", and its files can't be replaced in one step")
          .with_file(other->mark)
          .with_hint("save elsewhere, or remove that checkpoint first");
    }
  }
  if (terms.overwrite || here.found.format == nullptr) return;
  fail_exists("a checkpoint exists at " + location.describe(), "");
}

void expect_no_directory_of_index(Storage& location, const Format& format) {
  if (!location.facts().has_folders) return;
  const std::vector<std::string> directories = location.list_directories();
  if (!format.detect(directories)) return;
  throw Error(ErrorCode::kUnsupported, "a directory at " + location.describe() +
                                           " has the name of a file that makes a checkpoint")
      .with_file(format.index_files(directories).front())
      .with_hint("remove that directory, or save elsewhere");
}

// Shared directories (megatron_shards_dialect()). There Megatron-Core itself replaces common.pt
// before a save of the sharded part begins, and writes metadata.json after it has ended. So nothing
// of ours could switch the whole checkpoint, and the save is one in place: common.pt and files that
// the replaced .metadata does not name stay. The caller removes an older metadata.json first. From
// then until Megatron-Core's own save has ended, Megatron-Core's readers do not accept the
// directory as a checkpoint. Our readers do not accept it either once the new .metadata exists,
// because the manifest names the dialect (check_dialect() in open/opening.cc).
bool needs_sibling(Storage& location, const Standing& here, const SaveTerms& terms) {
  if (terms.dialect->shares_directory() || replaces_one_by_one(location, here, terms)) return false;
  const DetectedFormat& found = here.found;
  if (!has_fixed_names(*terms.format, *terms.dialect) && !here.foreign &&
      !(found.format && has_fixed_names(*found.format, *found.dialect))) {
    return false;
  }
  // Files of a save that is under way, or was killed, have names of their own.
  const auto is_apart = [](const std::string& name) {
    return in_tilestone_directory(name) || is_own_name(name);
  };
  return location.parent() || !std::ranges::all_of(here.names, is_apart);
}

bool replaces_one_by_one(Storage& location, const Standing& here, const SaveTerms& terms) {
  const DetectedFormat& found = here.found;
  return terms.overwrite && found.format != nullptr && terms.dialect->has_fixed_names() &&
         !terms.format->has_fixed_names() && found.format->name() == terms.format->name() &&
         found.dialect->name() == terms.dialect->name() && location.facts().put_if_tag;
}

void finish_index(Storage& location, const Standing& here, const std::string& existing) {
  if (here.found.dialect == nullptr) return;
  const bool has_tags = location.facts().put_if_tag;
  for (const std::string& file : here.found.dialect->index_files(here.of_checkpoint)) {
    const std::string copy = temporary_of(existing, file);
    if (!contains_name(here.names, copy)) continue;
    const auto standing = location.stat(file);
    const auto bytes = read_if_there(location, copy);
    if (!standing || !bytes || !(has_tags || is_whole(location, existing, file, *bytes))) continue;
    const Condition own = has_tags ? Condition::has(standing->tag) : Condition::always();
    location.put(file, *bytes, own, temporary_name(existing, "copy"), Deadline::never());
  }
}

void take_tags(Storage& location, const Standing& here, OldCheckpoint& old) {
  if (here.found.format == nullptr) return;
  std::vector<std::string> names = here.found.format->index_files(here.of_checkpoint);
  for (std::string& name : here.found.dialect->index_files(here.of_checkpoint)) {
    names.push_back(std::move(name));
  }
  const bool has_tags = location.facts().put_if_tag;
  for (const std::string& name : names) {
    const auto info = has_tags ? location.stat(name) : FileInfo{};
    if (info) old.tags[name] = info->tag;
  }
}

void forget_missing_tags(Storage& location, OldCheckpoint& old) {
  const StorageFacts facts = location.facts();
  if (facts.put_if_tag) return;
  if (!old.tags.empty() && !facts.put_if_absent) {
    throw Error(ErrorCode::kUnsupported, "the checkpoint at " + location.describe() +
                                             " can't be replaced: the store has no conditional "
                                             "writes, so nothing keeps two saves apart")
        .with_hint("save to a path where nothing is yet");
  }
  for (auto& [name, tag] : old.tags) {
    if (std::exchange(tag, "").empty()) continue;
    log(LogLevel::kWarning, "nothing keeps two saves apart that replace the checkpoint at " +
                                location.describe() + ": a put can't ask for a tag there");
  }
}

Condition condition_of(const OldCheckpoint& old, const SaveTerms& terms, const std::string& file) {
  const auto stood = old.tags.find(file);
  if (!terms.overwrite || stood == old.tags.end()) return Condition::absent();
  return stood->second.empty() ? Condition::always() : Condition::has(stood->second);
}

std::vector<std::string> take_stock(Storage& location, const Standing& here, const SaveTerms& terms,
                                    OldCheckpoint& old) {
  old.notes = here.notes;
  std::ranges::copy_if(here.names, std::back_inserter(old.own), is_own_name);
  // Rank-local metadata must be replaced even if it can't be read or is beside an ordinary index:
  // otherwise it would remain beside the new index.
  for (std::string& name : terms.format->rank_local_files(here.names)) {
    old.rank_local.insert(std::move(name));
  }
  ExistingCheckpoint existing;
  try {
    // Zarr arrays in a shared directory may belong to somebody else.
    const bool replaced = !terms.dialect->shares_directory() || terms.format->detect(here.names);
    if (replaced) existing = read_existing(location, here);
  } catch (const Error& error) {
    log(LogLevel::kWarning,
        std::string(
            "the checkpoint to be replaced can't be read, so some of its files may stay: ") +
            error.what());
    // Its save is one of these. None of the attempts is open (expect_free()).
    old.saves.merge(recorded_saves(location, here.names));
    return {};
  }
  old.files = std::move(existing.files);
  if (existing.found) old.saves.insert(existing.save_id);
  // After a removal of keys (removal.h), data files still have the id of the save that wrote them.
  for (const std::string& name : old.files) {
    if (const auto own = parse_tilestone_name(name)) old.saves.insert(own->noted);
  }
  if (!existing.found) {
    if (const auto lost = find_lost(location, here.names, here.notes)) {
      log(LogLevel::kWarning,
          lost->what + (lost->began_here ? "; they are removed once the new checkpoint exists"
                                         : "; this save does not remove them"));
      return {};
    }
  }
  return leftovers(old.own, old.files, old.notes,
                   old.notes.ended(existing.save_id, !existing.rank_local.empty()));
}

std::vector<std::string> files_to_remove(const OldCheckpoint& old, const SaveTerms& terms,
                                         const std::set<std::string>& made,
                                         const std::string& switch_name, bool has_claim) {
  std::set<std::string> gone;
  for (const std::string& name : old.files) {
    // The names may come from another writer's metadata. Of the files in kTilestoneDirectory,
    // remove only those with a name of ours.
    const bool ours_to_remove = !in_tilestone_directory(name) || is_own_name(name);
    if (ours_to_remove && name != switch_name && !made.contains(name)) gone.insert(name);
  }
  if (has_claim) {
    Notes notes = old.notes;
    notes.add(terms.save_id, old.saves);
    for (std::string& name : leftovers(old.own, made, notes, notes.ended(terms.save_id))) {
      // Ranks of this save may still look for its receipts.
      if (parse_tilestone_name(name)->save_id != terms.save_id) gone.insert(std::move(name));
    }
  }
  return {gone.begin(), gone.end()};
}

// ---- Rank-local checkpoints
//
// What a save does with a rank-local checkpoint that it replaces. Such a checkpoint has one
// metadata file for each rank instead of a common one. If a directory has both kinds, a reader
// can't tell which is valid, and one rename can't switch them. Therefore, before the switch, a
// small file (kReplacedName) states that the save with this id replaces rank-local files of these
// names and contents. A reader that finds both kinds uses the common metadata file if and only if
// it has that id and every rank-local file is listed. After the switch the rank-local files are
// removed first, then kReplacedName. If that was interrupted, the beginning of a later save does
// so.

// kReplacedName covers one save only, so this must happen before a save writes its own.
void finish_replacement(Storage& location, const Format& format, Standing& here) {
  const auto replaced = find_replaced(location, format, here.of_checkpoint);
  if (!replaced) return;
  std::set<std::string> gone;
  for (const auto& [name, hash] : replaced->files) gone.insert(name);
  remove_rank_local(location, gone);
  std::erase_if(gone, [&](const std::string& name) { return location.stat(name).has_value(); });
  for (auto* const names : {&here.names, &here.of_checkpoint}) {
    std::erase_if(*names, [&](const std::string& name) { return gone.contains(name); });
  }
}

void mark_replaced(Storage& location, const std::string& save_id,
                   const std::set<std::string>& rank_local, Deadline deadline) {
  Replaced replaced{save_id, {}};
  for (const std::string& name : rank_local) {
    replaced.files.emplace(name, xxh3_64(read_file(location, name, UINT64_MAX)));
  }
  location.publish(std::string(kReplacedName), temporary_name(save_id, "replaced"),
                   replaced.encode(), true, deadline);
}

// kReplacedName goes last, and only once all files that it lists are gone.
void remove_rank_local(Storage& location, const std::set<std::string>& rank_local) {
  remove_files(location, std::vector(rank_local.begin(), rank_local.end()));
  location.settle("");
  for (const std::string& name : rank_local) {
    if (location.stat(name)) return;
  }
  remove_files(location, std::vector{std::string(kReplacedName)});
}

void remove_directories_of_replaced(Storage& location, const OldCheckpoint& old) {
  std::set<std::string> attempts;
  for (const std::string& name : old.own) {
    const auto own = parse_in_tilestone_directory(name);
    if (!own || !old.saves.contains(own->save_id)) continue;
    if (own->kind == kAttemptKind || own->kind == kOutcomeKind) attempts.insert(own->save_id);
  }
  for (const std::string& save_id : attempts) location.tidy(attempt_directory(save_id));
}

}  // namespace tilestone::engine
