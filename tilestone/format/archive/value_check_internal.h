// Checks whether a value could be read back. Called for every value before a save writes anything.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tilestone/state/value.h"

namespace tilestone::archive {

// Error(kInvalidArgument) for a value that write_archive() can't write, or that read_archive() or
// Python could not read back. These are: values whose shared parts unfold to more than read_value()
// allows, and never because of size alone; text that is not UTF-8; names that no class can have;
// dict keys that can't be hashed; storages outside a tensor; a Pickled inside another value; a
// Pickled that the reader refuses. A Pickled is parsed without copying its tensors; other values
// are walked.
void check_value(const Value& value);

// The tree with each leaf that check_value() refuses replaced by a value that says why
// (reason_in()). Dicts and lists are walked. `change`, if not empty, is first called with each
// value and returns what takes its place.
using ChangeValue = std::function<Value(const Value&)>;
Value readable(const Value& tree, const ChangeValue& change = {});
// A value that says why another one can't be read.
Value unreadable(std::string reason);
// Why a part of the value can't be read; "": it can. No pickled object can pass for a reason in
// what readable() returns.
std::string reason_in(const Value& value);

// Checks a Pickled like check_value(). Returns the names of all Opaque objects in it, sorted.
std::vector<std::string> classes_in_pickle(ByteView pickled, bool archive);

// The pickle protocol that a value needs: 2, which every torch.load reads, or 4 if a class is
// nested in another class or has a name that protocol 2 would read as another name (Python 2's).
int protocol_of(const Value& value);

}  // namespace tilestone::archive
