// Takes any bytes as the file of a delta. What is parsed must be the same after writing and reading
// it again.
#include <algorithm>
#include <cstdlib>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/format/safetensors/delta_index.h"

namespace {

using namespace tilestone;

void check(ByteView file) {
  constexpr uint64_t kBegin = safetensors::kLengthBytes;
  const ByteView first = file.first(std::min<size_t>(file.size(), kBegin));
  const uint64_t length = safetensors::header_length(first, file.size(), "f");
  const auto header = parse_delta_header(file.subspan(kBegin, length), file.size(), "f");
  if (!header.index) return;
  const Bytes again = write_delta_header({}, &*header.index);
  const auto same = parse_delta_header(ByteView(again).subspan(kBegin), again.size(), "f");
  if (same.index->tensors.size() != header.index->tensors.size()) abort();
  for (size_t i = 0; i < same.index->tensors.size(); ++i) {
    const DeltaTensor &a = header.index->tensors[i], &b = same.index->tensors[i];
    if (a.key != b.key || a.before != b.before || a.pieces.size() != b.pieces.size()) abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    check(ByteView(reinterpret_cast<const std::byte*>(data), size));
  } catch (const Error&) {
  }
  return 0;
}
