// What a save does with a rank-local checkpoint that it replaces: see transaction.cc.
#include <string>
#include <vector>

#include "tilestone/base/checksum.h"
#include "tilestone/engine/commit/transaction_internal.h"
#include "tilestone/engine/open/attempt_files_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"

namespace tilestone::engine {

// Completes step 5 of an earlier save that replaced a rank-local checkpoint and was interrupted.
// kReplacedName covers one save only, so this must happen before this save writes its own.
void Transaction::finish_replacement() {
  const auto replaced = find_replaced(*storage_, *format_);
  if (!replaced) return;
  for (const auto& [name, hash] : replaced->files) old_rank_local_.insert(name);
  remove_rank_local();
  old_rank_local_.clear();
}

void Transaction::mark_replaced(Deadline deadline) {
  Replaced replaced{save_id_, {}};
  for (const std::string& name : old_rank_local_) {
    replaced.files.emplace(name, xxh3_64(read_file(*storage_, name, UINT64_MAX)));
  }
  storage_->publish(std::string(kReplacedName), temporary_name(save_id_, "replaced"),
                    replaced.encode(), true, deadline);
}

// Removes kReplacedName last, and only once all files that it lists are gone.
void Transaction::remove_rank_local() {
  const std::string note(kReplacedName);
  if (!storage_->stat(note)) return;
  remove_files(*storage_, std::vector(old_rank_local_.begin(), old_rank_local_.end()));
  storage_->sync_directory("");
  for (const std::string& name : old_rank_local_) {
    if (storage_->stat(name)) return;
  }
  remove_files(*storage_, std::vector{note});
}

// A replaced rank-local checkpoint of a save by files has left directories for its receipts.
void Transaction::remove_directories_of_replaced() {
  const std::string own(kTilestoneDirectory);
  for (const std::string& name : storage_->list_directories(own + "/")) {
    const auto left = parse_in_tilestone_directory(name + "/");
    if (!left || !noted_.contains(left->save_id)) continue;
    if (storage_->list(name + "/").empty()) storage_->remove_tree(name);
  }
}

}  // namespace tilestone::engine
