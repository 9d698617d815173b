// The removal of a checkpoint as a whole: of a run's step. whole_removal.cc describes the protocol.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// The files that make a directory a checkpoint, in the order in which they are removed. `names`:
// all of its files, sorted.
std::vector<std::string> describing_files(Storage& storage, std::span<const std::string> names);

// `names`: all of the place's files, sorted, if nobody can have changed them since they were
// listed; else none.
using MayGo = std::function<bool(Storage& place, std::span<const std::string> names)>;

// What goes, by the mark of a removal.
struct RemovalMark;

// Steps 2 and 3. Null: there is nothing to remove, its removal has begun before, or `may_go`, which
// is asked in step 2, says no. `claim`: of the place, which the caller holds; null: there are none,
// and files of saves that are not the checkpoint's stay.
std::shared_ptr<const RemovalMark> begin_removal(Storage& place, StorageClaim* claim,
                                                 const MayGo& may_go = nullptr);
// The files of a removal that has begun here, in the order in which they go; nullopt: none has.
std::optional<std::vector<std::string>> files_of_removal(Storage& place);
// Steps 4 to 6, if a removal has begun here. The caller holds the claim, where there are claims.
// `mark`, `claim`: what begin_removal() has just returned and got; null: the mark is read. False:
// another save has published a checkpoint meanwhile, which stays.
bool finish_removal(Storage& place, std::shared_ptr<const RemovalMark> mark = nullptr,
                    StorageClaim* claim = nullptr);
// The same, for a save that is about to begin here: takes the claim. Error(kAlreadyExists) where
// another process holds it.
void end_removal(Storage& place, const Deadline& patience = Deadline::never());

}  // namespace tilestone::engine
