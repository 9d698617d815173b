// Whether what would be written can be read back: asked of every value before a save writes
// anything.
#pragma once

#include <string>
#include <vector>

#include "tilestone/state/value.h"

namespace tilestone::archive {

// Throws Error(kInvalidArgument) for a value that write_archive can't write, or that read_archive,
// or Python, could not make again: nested deeper than kMaxDepth, unfolding to more than
// kMaxUnfolded bytes, text that is not UTF-8, a name that no class can have, a dict key that can't
// be hashed, a storage outside a tensor, a Pickled inside another value, and a Pickled that the
// reader refuses. Pickled objects are parsed, their tensors are not copied; all else is walked.
void check_value(const Value& value);

// As check_value of a Pickled, and the names of all Opaque objects in it, sorted.
std::vector<std::string> classes_in_pickle(ByteView pickled, bool archive);

// What a pickle has to say: 2, which every torch.load reads; 4 where a class stands inside a class,
// or its module has a name that protocol 2 means for another one.
int protocol_of(const Value& value);

}  // namespace tilestone::archive
