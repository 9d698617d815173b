// Reads a file of torch.save without the elements of its tensors: of the file, only the zip
// directory and the pickle are read.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "tilestone/base/dtype.h"
#include "tilestone/format/archive/value_check_internal.h"
#include "tilestone/format/format.h"
#include "tilestone/format/index.h"
#include "tilestone/geometry/box.h"
#include "tilestone/state/metadata.h"
#include "tilestone/state/tensor_view.h"
#include "tilestone/state/value.h"

namespace tilestone::archive {

// A tensor of the file. Offsets and sizes are in bytes.
struct FileTensor {
  // A record of the file.
  struct Record {
    uint64_t offset = 0;  // in the file
    uint64_t size = 0;
    std::optional<uint32_t> crc32 = std::nullopt;
  };

  DType dtype = DType::kFloat32;
  Dims shape;
  Dims strides;                                // elements
  uint64_t offset = 0;                         // of element [0, ..., 0] in the file
  Record record = {};                          // which holds the elements
  bool is_lazy = false;                        // the elements must be computed from the stored ones
  std::shared_ptr<const void> more = nullptr;  // what the format adds
};

// A tensor of this shape that stands for one of a file. It has no usable memory.
TensorView stand_in(FileTensor tensor, const Dims& shape);
const FileTensor& stood_for(const TensorView& tensor);

// As Format::next_part().
std::optional<ProbeRange> next_part(const FileParts& read);
// What the file holds; its tensors are stand-ins. What can't be read is replaced by a value for
// which reason_in() says why. `change`: as for readable(), by default shown_in_file().
Value shown_in_file(const Value& value);
Value read_file(const FileParts& read, const ChangeValue& change = shown_in_file);

// The elements `part` of the tensor, as the chunk `box`.
StoredChunk chunk_of(const FileTensor& tensor, const Box& part, const Box& box, uint32_t file);

}  // namespace tilestone::archive
