// Reads one torch.save archive: its records, and the object or tensor that its pickle describes.
#pragma once

#include <optional>

#include "tilestone/base/bytes.h"
#include "tilestone/format/archive/zip_reader_internal.h"
#include "tilestone/format/format.h"
#include "tilestone/state/value.h"

namespace tilestone::archive {

// All functions throw Error(kCorrupt, kUnsafe, kUnsupported) with the offset in the item.

// Finds the elements of the only tensor in the archive. nullopt if the available bytes don't
// contain all of the archive's structure that is needed.
std::optional<StoredPayload> locate_tensor(const ItemBytes& item);

// The whole archive as a value. Its tensors are views that share the item's bytes, or own copies of
// their records if these are borrowed.
Value read_archive(const SharedBytes& item);
// The whole archive as a value. Its tensors borrow the item's bytes, which must outlive the value.
Value view_archive(ByteView item);

// Checks every checksum, the structure, and the sizes of the tensors' records. Returns a wrong
// checksum; throws if the structure is damaged.
std::optional<ItemFault> check_archive(ByteView item);
// The same, but damage that can't be read past is returned too. Throws only kUnsafe.
std::optional<ItemFault> find_fault(ByteView item);

}  // namespace tilestone::archive
