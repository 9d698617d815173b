// What stands at the location of a save: whether the save may begin there, and what it replaces.
// All of it follows from one look (look_at()).
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/engine/open/detect_internal.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/format.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

struct SaveTerms {
  std::shared_ptr<const Format> format;
  std::shared_ptr<const Dialect> dialect;
  std::string save_id;
  bool overwrite = false;
  bool one_writer = false;  // Transaction
};

// Throws the errors of Transaction::begin() that follow from what stands at the location.
void expect_free(Storage& location, const Standing& here, const SaveTerms& terms);
// A directory with the name of a file that makes a checkpoint: the switch would fail. Object stores
// have none.
void expect_no_directory_of_index(Storage& location, const Format& format);
// Whether the new or the existing checkpoint has files whose names contain no save id. A stock
// reader would mix old and new ones. If the location is empty and has no parent for a sibling
// directory, the save can be made in place, because the switch is published last.
bool needs_sibling(Storage& location, const Standing& here, const SaveTerms& terms);

// Whether the save is one in place all the same, and puts the files with fixed names one by one:
// where a put can ask for a tag, over a checkpoint of the same format and dialect.
bool replaces_one_by_one(Storage& location, const Standing& here, const SaveTerms& terms);

// What a save in place replaces and removes.
struct OldCheckpoint {
  bool one_by_one = false;           // replaces_one_by_one()
  std::set<std::string> files;       // data files and manifest
  std::set<std::string> rank_local;  // its metadata files, if it is a rank-local checkpoint
  // The saves that wrote these files, and this one if its files have other names than its id, as
  // its note names them (leave_note()).
  std::set<std::string> saves;
  std::vector<std::string> own;  // all files with names of ours that stand there
  // The files of its index that stand there, and their tags ("" where there are none).
  std::map<std::string, std::string> tags;
  Notes notes;
};
// Adds the tags of what stands here to `old`. What is read of it later is what is replaced, or the
// tag differs and nothing is.
void take_tags(Storage& location, const Standing& here, OldCheckpoint& old);
// Where the first put with a condition has shown that there are no tags (StorageFacts::put_if_tag):
// forgets them. Error(kUnsupported) if a checkpoint stands there and puts have no condition at all.
void forget_missing_tags(Storage& location, OldCheckpoint& old);
// What must hold when a file of the new index is put.
Condition condition_of(const OldCheckpoint& old, const SaveTerms& terms, const std::string& file);
// Adds what stands here to `old`. Returns the leftovers: none if the checkpoint can't be read, or
// has only lost its metadata. They go only once the new checkpoint exists.
std::vector<std::string> take_stock(Storage& location, const Standing& here, const SaveTerms& terms,
                                    OldCheckpoint& old);
// The files that a save of these terms removes once it has published the files `made`, without its
// note. `has_claim`: leftovers of other saves, too.
std::vector<std::string> files_to_remove(const OldCheckpoint& old, const SaveTerms& terms,
                                         const std::set<std::string>& made,
                                         const std::string& switch_name, bool has_claim);

// Completes the save `existing` that has put its switch, and was killed before it had put all files
// that follow. The caller holds the claim.
void finish_index(Storage& location, const Standing& here, const std::string& existing);

// ---- Rank-local checkpoints

// Completes the last step of an earlier save that was interrupted. `here` then lacks what is gone.
void finish_replacement(Storage& location, const Format& format, Standing& here);
// Leaves kReplacedName, before the switch of the save that replaces these files.
void mark_replaced(Storage& location, const std::string& save_id,
                   const std::set<std::string>& rank_local, Deadline deadline);
// Removes the files, and then kReplacedName.
void remove_rank_local(Storage& location, const std::set<std::string>& rank_local);
// A replaced checkpoint of a save by files has left directories for its receipts.
void remove_directories_of_replaced(Storage& location, const OldCheckpoint& old);

}  // namespace tilestone::engine
