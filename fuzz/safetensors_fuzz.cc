// Takes any bytes as a safetensors file, and as the index of a folder of them. What is parsed must
// be the same after writing and reading it again.
#include <algorithm>
#include <cstdlib>

#include "tilestone/base/error.h"
#include "tilestone/format/safetensors/header_internal.h"
#include "tilestone/format/safetensors/weight_map_internal.h"

namespace {

using namespace tilestone;
using namespace tilestone::safetensors;

// The number of bytes after the header.
uint64_t data_bytes(const std::vector<HeaderTensor>& tensors) {
  return tensors.empty() ? 0 : tensors.back().end;
}

void check_file(ByteView file) {
  const ByteView first = file.first(std::min<size_t>(file.size(), kLengthBytes));
  const uint64_t length = header_length(first, file.size(), "f");
  const auto tensors = parse_header(file.subspan(kLengthBytes, length), file.size(), "f");
  const Bytes again = write_header(tensors);
  const auto same =
      parse_header(ByteView(again).subspan(kLengthBytes), again.size() + data_bytes(tensors), "f");
  if (same.size() != tensors.size()) abort();
  for (size_t i = 0; i < same.size(); ++i) {
    if (same[i].key != tensors[i].key || same[i].shape != tensors[i].shape ||
        same[i].dtype != tensors[i].dtype || same[i].begin != tensors[i].begin ||
        same[i].end != tensors[i].end) {
      abort();
    }
  }
}

void check_index(ByteView text) {
  const WeightMap map = parse_weight_map(text, "i");
  if (parse_weight_map(write_weight_map(map, 0), "i") != map) abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const ByteView bytes(reinterpret_cast<const std::byte*>(data), size);
  for (const auto& check : {&check_file, &check_index}) {
    try {
      check(bytes);
    } catch (const Error&) {
    }
  }
  return 0;
}
