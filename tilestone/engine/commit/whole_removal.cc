// The protocol:
//
//  1. The place is claimed, so that no save, repair or other removal is at work there.
//  2. All names there are listed. Where a put can ask for a tag, those of the describing files are
//     taken. Then the caller looks whether what stands there is what it wants to remove.
//  3. A mark (kRemovedName) that lists them is put, if absent. From then on there is no checkpoint
//     here for readers of ours, whatever its format: one put decides.
//  4. The files that describe the checkpoint are removed, the switch first, and their removal is
//     settled. From then on there is none for other programs. Where there are tags, one that has a
//     fixed name is replaced by kGone if it still has its tag, and then removed under that of
//     kGone. Who has just put the mark and is alone removes it at once under its tag: while a lease
//     is held, and if no save without a claim (commit/attempt.cc) had begun there at step 2.
//  5. The other files of the list are removed, and settled. In an object store those of step 4 that
//     have no fixed name go with them.
//  6. The mark is removed.
//
// A crash before step 3 changes nothing. After it, whoever claims the place next goes on at step 4
// with the same list: the next pruning, gc, or a save that begins here. No save begins beside a
// mark, so the list names no file of a later save but those with fixed names. A mark that is put
// late, after step 6, is void if a save has been there since: a tag differs, or, where there are
// none, a manifest stands that the list lacks. Until somebody goes on with it, it hides that
// checkpoint.
//
// Who is alone: other saves and removals wait for the lease, and saves without a claim that begin
// later find the mark. The removals of step 4 end before the lease can lapse.
//
// A reader that has opened the checkpoint before gets an error for each file that is gone.
//
// Where there are no claims, the mark keeps two removals and later saves apart. A save that had
// begun before is not seen, so the list then has none of its files. If it publishes before step 4,
// the tag differs: the mark is taken back, and its checkpoint stays. If it comes later, its switch
// is refused, because what it would replace has another tag (transaction.cc). Where there are
// neither claims nor tags, the two are not kept apart.
#include "tilestone/engine/commit/whole_removal_internal.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "tilestone/base/both_ways.h"
#include "tilestone/base/bytes.h"
#include "tilestone/base/error.h"
#include "tilestone/base/uuid.h"
#include "tilestone/engine/commit/claim_internal.h"
#include "tilestone/engine/commit/sibling_internal.h"
#include "tilestone/engine/open/attempt_files_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/description_internal.h"
#include "tilestone/engine/open/detect_internal.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/torch_dist/torch_dist.h"

namespace tilestone::engine {
namespace {

constexpr std::string_view kGone = "this checkpoint is removed\n";

}  // namespace

struct RemovalMark {
  std::vector<std::string> describing, others;
  std::map<std::string, std::string> tags;  // of describing files with fixed names, where there are
  std::string id = random_uuid();           // so that two marks differ
  bool is_alone = false;                    // who has just put it, while he holds his lease

  // As in base/both_ways.h.
  static void walk(auto& io, auto& mark) {
    both::texts(io, mark.describing);
    both::texts(io, mark.others);
    both::text_map(io, mark.tags);
    both::text(io, mark.id);
  }
  Bytes encode() const {
    ByteWriter writer;
    walk(writer, *this);
    return std::move(writer).take();
  }
  static RemovalMark decode(ByteView bytes) {
    ByteReader reader(bytes, std::string(kRemovedName));
    RemovalMark mark;
    walk(reader, mark);
    reader.expect_end();
    return mark;
  }
};

namespace {

std::map<std::string, std::string> tags_of(Storage& place,
                                           const std::vector<std::string>& describing) {
  std::map<std::string, std::string> tags;
  if (!place.facts().put_if_tag) return tags;
  for (const std::string& name : describing) {
    const auto info = is_own_name(name) ? std::nullopt : place.stat(name);
    if (info && !info->tag.empty()) tags.emplace(name, info->tag);
  }
  return tags;
}

// Also false: another save's files have come in their place.
bool replace_describing(Storage& place, const RemovalMark& mark) {
  for (const auto& [name, tag] : mark.tags) {
    if (place.put(name, as_bytes(kGone), Condition::has(tag),
                  temporary_name(random_uuid(), "removed"), Deadline::never())) {
      continue;
    }
    const auto now = read_if_there(place, name);
    if (now && as_text(*now) != kGone) return false;
  }
  return true;
}

// Only asked where there are no tags, which tell more.
bool lacks_a_manifest(Storage& place, const RemovalMark& mark) {
  if (!mark.tags.empty()) return false;
  const auto names = place.list_files(std::string(kTilestoneDirectory) + "/");
  return std::ranges::any_of(names, [&](const std::string& name) {
    return kind_of(name) == kManifestKind && std::ranges::count(mark.describing, name) == 0;
  });
}

std::shared_ptr<RemovalMark> read_mark(Storage& place) {
  const auto bytes = read_if_there(place, std::string(kRemovedName));
  return bytes ? std::make_shared<RemovalMark>(RemovalMark::decode(*bytes)) : nullptr;
}

// Whether all files there are of the one save whose checkpoint stands, which has ended.
bool is_of_one_save(const Standing& here) {
  std::set<std::string> saves;
  bool has_manifest = false;
  for (const std::string& name : here.names) {
    const auto own = parse_tilestone_name(name);
    if (!own) continue;
    if (own->kind != kManifestKind && own->kind != kDataKind) return false;
    has_manifest |= own->kind == kManifestKind;
    saves.insert(own->save_id);
  }
  return has_manifest && saves.size() == 1 && here.found.format != nullptr;
}

// Without those that belong to saves of which the checkpoint among these names has no file. If that
// can't be read: without those of saves that have left a note, which may be under way.
std::vector<std::string> without_other_saves(Storage& place, const Standing& here) {
  if (is_of_one_save(here)) return here.names;
  std::set<std::string> saves;
  bool is_read = true;
  try {
    const ExistingCheckpoint existing = read_existing(place, here);
    saves.insert(existing.save_id);
    for (const std::string& name : existing.files) {
      if (const auto own = parse_tilestone_name(name)) saves.insert(own->save_id);
    }
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kCorrupt && error.code() != ErrorCode::kUnsafe) throw;
    is_read = false;
    for (const std::string& name : here.names) {
      const auto own = parse_tilestone_name(name);
      if (own && own->kind == kNoteKind) saves.insert(own->save_id);
    }
  }
  std::vector<std::string> names = here.names;
  std::erase_if(names, [&](const std::string& name) {
    const auto own = parse_tilestone_name(name);
    return own && saves.contains(own->save_id) != is_read;
  });
  return names;
}

void remove_settled(Storage& place, const std::vector<std::string>& names) {
  std::set<std::string> directories;
  for (const std::string& name : names) {
    const size_t slash = name.rfind('/');
    directories.insert(slash == std::string::npos ? "" : name.substr(0, slash));
  }
  place.remove(names);
  for (const std::string& directory : directories) {
    try {
      place.settle(directory);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kNotFound) throw;  // it is gone with its files
    }
  }
}

// Removes the files that have tags. False: another save's files have come in their place. A process
// that comes late, when the place has been saved to anew, finds no kGone there.
bool remove_fixed(Storage& place, const RemovalMark& mark) {
  if (lacks_a_manifest(place, mark) || !replace_describing(place, mark)) return false;
  for (const auto& [name, tag] : mark.tags) {
    const auto info = place.stat(name);
    const auto now = info ? read_if_there(place, name) : std::nullopt;
    if (now && as_text(*now) == kGone) place.remove_if(name, info->tag, Deadline::never());
  }
  return true;
}

// The same for who is alone until then.
bool remove_fixed_alone(Storage& place, const RemovalMark& mark, const Deadline& until) {
  return std::ranges::all_of(mark.describing, [&](const std::string& name) {
    const auto tag = mark.tags.find(name);
    return tag == mark.tags.end() || place.remove_if(name, tag->second, until, true);
  });
}

// Once files with fixed names are gone, the others describe nothing, and go at once.
void remove_others(Storage& place, const RemovalMark& mark) {
  std::vector<std::string> names = mark.describing;
  std::erase_if(names, [&](const std::string& name) { return mark.tags.contains(name); });
  if (mark.tags.empty()) remove_settled(place, std::exchange(names, {}));
  names.insert(names.end(), mark.others.begin(), mark.others.end());
  remove_settled(place, names);
}

}  // namespace

std::vector<std::string> describing_files(Storage& storage, std::span<const std::string> names) {
  std::vector<std::string> files = megatron_dialect()->index_files(names);
  std::ranges::reverse(files);  // its mark, metadata.json, goes first
  try {
    if (const DetectedFormat found = detect(storage, names); found.format != nullptr) {
      for (std::string& file : found.format->index_files(names)) files.push_back(std::move(file));
    }
  } catch (const Error& error) {  // what can't be read goes all the same
    log(LogLevel::kDebug, std::string("the format of a removed checkpoint: ") + error.what());
  }
  std::ranges::copy_if(names, std::back_inserter(files),
                       [](const std::string& file) { return kind_of(file) == kManifestKind; });
  std::set<std::string> seen;
  std::erase_if(files, [&](const std::string& file) { return !seen.insert(file).second; });
  return files;
}

// The tags are taken after the names are listed and before the index is read: so the three are of
// the same checkpoint, or a tag differs later. Who is alone when the tags are taken was so when he
// listed the names, and need not list them again.
std::shared_ptr<const RemovalMark> begin_removal(Storage& place, StorageClaim* claim,
                                                 const MayGo& may_go) {
  Standing here;
  if (claim != nullptr) here.names = names_at(place);
  if (claim == nullptr) here = look_at(place, torch_dist_format());
  if (contains_name(here.names, kRemovedName)) return nullptr;
  auto mark = std::make_shared<RemovalMark>();
  mark->tags = tags_of(place, describing_files(place, here.names));
  mark->is_alone = place.facts().claims_are_leases() && is_held(claim) &&
                   std::ranges::none_of(here.names, [](const std::string& name) {
                     return kind_of(name) == kAttemptKind;
                   });
  std::vector<std::string> names = claim != nullptr ? here.names : without_other_saves(place, here);
  std::erase(names, kLockName);
  const std::vector<std::string> listed = mark->is_alone ? here.names : std::vector<std::string>();
  if (names.empty() || (may_go && !may_go(place, listed))) return nullptr;
  mark->describing = describing_files(place, names);
  const std::set<std::string> first(mark->describing.begin(), mark->describing.end());
  std::erase_if(names, [&](const std::string& name) { return first.contains(name); });
  mark->others = std::move(names);
  const bool is_first = place.put(std::string(kRemovedName), mark->encode(), Condition::absent(),
                                  temporary_name(random_uuid(), "removed"), Deadline::never());
  return is_first ? mark : nullptr;
}

std::optional<std::vector<std::string>> files_of_removal(Storage& place) {
  auto mark = read_mark(place);
  if (!mark) return std::nullopt;
  std::vector<std::string> files = std::move(mark->describing);
  files.insert(files.end(), mark->others.begin(), mark->others.end());
  return files;
}

bool finish_removal(Storage& place, std::shared_ptr<const RemovalMark> mark, StorageClaim* claim) {
  if (mark == nullptr) mark = read_mark(place);
  if (mark == nullptr) return true;
  const bool is_same = mark->is_alone && is_held(claim)
                           ? remove_fixed_alone(place, *mark, claim->held_until(Deadline::never()))
                           : remove_fixed(place, *mark);
  if (is_same) remove_others(place, *mark);
  place.remove(std::string(kRemovedName));
  return is_same;
}

void end_removal(Storage& place, const Deadline& patience) {
  if (!place.stat(std::string(kRemovedName))) return;
  const auto lock = lock_if_possible(place, patience);
  if (lock && *lock == nullptr) fail_under_way(place, "a removal", "try again when it has ended");
  finish_removal(place);
}

}  // namespace tilestone::engine
