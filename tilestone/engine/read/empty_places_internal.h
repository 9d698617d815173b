// Empty dicts and lists of a template, which ask for what the checkpoint has below them: an
// optimizer has no state before its first step.
//
// What is stored there is loaded in the stored shapes. That is right where an array is whole on
// this rank, which the template can't say: it has no array there. So
//  - an array in whose place the template has a sharded tensor of the same shape elsewhere is taken
//    for a part of its state, whose place nobody knows;
//  - any other array is whole if a chunk holds all of it (a plain array is stored so), or if the
//  load
//    has one rank only.
#pragma once

#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/state/metadata.h"
#include "tilestone/state/state_dict.h"

namespace tilestone::engine {

// The paths of a rank's empty dicts and lists below the root, except LoadOptions::kept_empty and
// those in which the options name something. Empty without fill_empty.
std::vector<Path> empty_places(const StateDict& wanted, const LoadOptions& options);

// The message with the places in front.
Bytes with_places(ByteView message, const std::vector<Path>& places);
// Removes them from every rank's message. Returns, dotted, the places that are empty on every rank:
// what only some ranks lack they may not hold, such as a pipeline stage another stage's parameters.
std::vector<std::string> take_common_places(std::vector<Bytes>& messages);

// All that a load reads without its being named: LoadOptions::subtrees, and those of `empty` and
// LoadOptions::unmade whose arrays are whole on this rank. Error(kMismatch) if others have arrays,
// unless differences.not_requested is kReport or kIgnore; and if a tensor is stored in place of an
// empty dict. `ranks`: the number of ranks that load.
std::vector<Path> filled_places(const StateDict& wanted, const std::vector<Path>& empty,
                                const Metadata& stored, const LoadOptions& options, int ranks);

}  // namespace tilestone::engine
