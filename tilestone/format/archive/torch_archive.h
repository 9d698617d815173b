// torch.save archives and pickles as values, read and written without torch and without executing
// anything. Any format may hold them; the spec is docs/formats/torch_dist.md.
#pragma once

#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/state/value.h"

namespace tilestone {

// One torch.save archive (a file such as common.pt, or an object item) as a value.
Value read_torch_archive(ByteView bytes);
// A bare pickle as a value. Classes that are no Value come back as Opaque.
Value read_pickle(ByteView bytes);
// What torch.load(weights_only=True) reads back as the same plain objects and tensors.
Bytes write_torch_archive(const Value& value);

// The classes and functions ("argparse.Namespace") whose objects a pickled object would come back
// with as Opaque, sorted; nothing is copied. `archive` as in Pickled. Error(kInvalidArgument) for
// one that could not be read back.
std::vector<std::string> classes_in(ByteView pickled, bool archive);

}  // namespace tilestone
