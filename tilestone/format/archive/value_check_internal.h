// Checks whether a value could be read back. Called for every value before a save writes anything.
#pragma once

#include <string>
#include <vector>

#include "tilestone/state/value.h"

namespace tilestone::archive {

// Error(kInvalidArgument) for a value that write_archive() can't write, or that read_archive() or
// Python could not read back. These are: values nested deeper than kMaxDepth; values whose shared
// parts unfold to more than read_value() allows, and never because of size alone; text that is not
// UTF-8; names that no class can have; dict keys that can't be hashed; storages outside a tensor; a
// Pickled inside another value; a Pickled that the reader refuses. A Pickled is parsed without
// copying its tensors; other values are walked.
void check_value(const Value& value);

// Checks a Pickled like check_value(). Returns the names of all Opaque objects in it, sorted.
std::vector<std::string> classes_in_pickle(ByteView pickled, bool archive);

// The pickle protocol that a value needs: 2, which every torch.load reads, or 4 if a class is
// nested in another class or has a name that protocol 2 would read as another name (Python 2's).
int protocol_of(const Value& value);

}  // namespace tilestone::archive
