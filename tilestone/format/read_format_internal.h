// The common part of formats that are opened but that saves don't write. A tensor's item is its
// elements and nothing else.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/format/format.h"
#include "tilestone/format/index.h"
#include "tilestone/state/items.h"
#include "tilestone/state/metadata.h"

namespace tilestone {

class ReadFormat : public Format {
 public:
  // Error(kUnsupported) with a hint to convert().
  void check(const Items& items) const override;
  bool has_fixed_names() const override { return true; }
  std::unique_ptr<ItemEncoder> encoder() const override { fail_only_read(); }
  Index encode_index(const Metadata&) const override { fail_only_read(); }

  // The metadata alone determines where each element is.
  std::vector<ProbeRange> probe(const ItemLocation&) const override { return {}; }
  StoredPayload parse_tensor(const StoredTensor& tensor, const StoredChunk& chunk,
                             const ItemLocation& at,
                             std::span<const ByteView> probed) const override;
  Bytes decode(Codec codec, ByteView item, uint64_t max_size) const override;
  std::optional<ItemFault> verify_tensor(const StoredTensor& tensor, const StoredChunk& chunk,
                                         ByteView item) const override;

 protected:
  [[noreturn]] void fail_only_read() const;
};

}  // namespace tilestone
