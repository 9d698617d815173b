// Takes any bytes as a tensor's item: the reported payload must be inside the item.
#include <cstdlib>

#include "tilestone/base/error.h"
#include "tilestone/format/torch_dist/torch_dist.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const tilestone::ByteView item(reinterpret_cast<const std::byte*>(data), size);
  const tilestone::ItemLocation at{.length = size};
  const auto format = tilestone::torch_dist_format();
  try {
    std::vector<tilestone::ByteView> probed;
    for (const auto& range : format->probe(at)) {
      probed.push_back(item.subspan(range.offset, range.size));
    }
    const tilestone::StoredPayload payload = format->parse_tensor({}, {}, at, probed);
    if (payload.record_size > size || payload.record_offset > size - payload.record_size) abort();
  } catch (const tilestone::Error&) {
  }
  return 0;
}
