// Reads and writes torch.save archives and pickles as values, without torch and without executing
// anything. Any format may use them. docs/formats/torch_dist.md specifies them.
#pragma once

#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/state/value.h"

namespace tilestone {

// Reads one torch.save archive (a file such as common.pt, or the item of an object). Objects of
// classes that Value has no kind for are read as Opaque. Errors: kCorrupt, kUnsafe, kUnsupported.
Value read_torch_archive(ByteView bytes);
// Reads a bare pickle in the same way. A tensor in it is Error(kUnsupported).
Value read_pickle(ByteView bytes);
// Writes a torch.save archive. torch.load(weights_only=True) reads plain objects and tensors back
// from it unchanged.
Bytes write_torch_archive(const Value& value);

// The names of the classes and functions ("argparse.Namespace") that a pickled object would be read
// back with as Opaque, sorted. Copies no tensors. `archive`: as in Pickled. Error(kInvalidArgument)
// if the object could not be read back.
std::vector<std::string> classes_in(ByteView pickled, bool archive);

}  // namespace tilestone
