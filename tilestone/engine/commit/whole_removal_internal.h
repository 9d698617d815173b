// The removal of a checkpoint as a whole: of a run's step. whole_removal.cc describes the protocol.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// The files that make a directory a checkpoint, in the order in which they are removed. `names`:
// all of its files, sorted.
std::vector<std::string> describing_files(Storage& storage, std::span<const std::string> names);

using MayGo = std::function<bool(Storage& place)>;

// Steps 2 and 3. False: there is nothing to remove, its removal has begun before, or `may_go`,
// which is asked in step 2, says no. `has_claim`: the caller holds the claim of the place;
// otherwise files of saves that are not the checkpoint's stay.
bool begin_removal(Storage& place, bool has_claim, const MayGo& may_go = nullptr);
// The files of a removal that has begun here, in the order in which they go; nullopt: none has.
std::optional<std::vector<std::string>> files_of_removal(Storage& place);
// Steps 4 to 6, if a removal has begun here. The caller holds the claim, where there are claims.
// False: another save has published a checkpoint meanwhile, which stays.
bool finish_removal(Storage& place);
// The same, for a save that is about to begin here: takes the claim. Error(kAlreadyExists) where
// another process holds it.
void end_removal(Storage& place, const Deadline& patience = Deadline::never());

}  // namespace tilestone::engine
