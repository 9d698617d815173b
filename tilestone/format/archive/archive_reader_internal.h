// One torch.save archive: its records, and the object or tensor that its pickle describes.
#pragma once

#include <optional>

#include "tilestone/base/bytes.h"
#include "tilestone/format/archive/zip_reader_internal.h"
#include "tilestone/format/format.h"
#include "tilestone/state/value.h"

namespace tilestone::archive {

// All throw Error(kCorrupt, kUnsafe, kUnsupported) with the offset in the item.

// The place of the one tensor that the archive holds; nullopt when what is needed of the archive
// is not among the bytes at hand.
std::optional<StoredPayload> locate_tensor(const ItemBytes& item);

// The whole archive as a value; its tensors own copies of their records.
Value read_archive(ByteView item);
// The same with tensors that are views of the item: nothing is copied that the item must outlive.
Value view_archive(ByteView item);

// Checks every checksum, the structure, and the tensors against their records. A wrong checksum is
// returned, a broken structure thrown.
std::optional<ItemFault> check_archive(ByteView item);

}  // namespace tilestone::archive
