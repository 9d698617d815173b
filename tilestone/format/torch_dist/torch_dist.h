// PyTorch's torch_dist format (torch.distributed.checkpoint), read and written without torch. The
// spec is docs/formats/torch_dist.md.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tilestone/format/format.h"

namespace tilestone {

// The torch dialect: anything that is not wrapped has its dotted path as key.
std::shared_ptr<const Format> torch_dist_format();

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
