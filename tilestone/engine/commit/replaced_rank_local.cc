// What a save does with a rank-local checkpoint that it replaces. Such a checkpoint has one
// metadata file for each rank instead of a common one. If a directory has both kinds, a reader
// can't tell which is valid, and one rename can't switch them. Therefore, before the switch, a
// small file (kReplacedName) states that the save with this id replaces rank-local files of these
// names and contents. A reader that finds both kinds uses the common metadata file if and only if
// it has that id and every rank-local file is listed. After the switch the rank-local files are
// removed first, then kReplacedName. If that was interrupted, the beginning of a later save does
// so.
#include <string>
#include <vector>

#include "tilestone/base/checksum.h"
#include "tilestone/engine/commit/old_checkpoint_internal.h"
#include "tilestone/engine/open/attempt_files_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/description_internal.h"

namespace tilestone::engine {

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
