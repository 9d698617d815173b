// `.zarray`: the file that describes one array of zarr v2. See docs/formats/zarr.md.
#pragma once

#include <string>

#include "tilestone/base/bytes.h"
#include "tilestone/base/dtype.h"
#include "tilestone/geometry/box.h"

namespace tilestone::zarr {

struct ArrayMetadata {
  DType dtype = DType::kFloat32;
  Dims shape;
  Dims chunk_shape;      // elements, as many dims as `shape`, all >= 1
  bool fortran = false;  // a chunk's elements are in Fortran order
  char separator = '.';  // between the numbers in a chunk's file name: '.' or '/'

  uint64_t chunk_bytes() const;  // the size of each chunk's file, also at the tensor's edges
  Dims chunk_strides() const;    // elements
  friend bool operator==(const ArrayMetadata&, const ArrayMetadata&) = default;
};

// Parses the text of a `.zarray` file. Errors name `file`. Error(kCorrupt) if the text is not a
// valid description of an array, or if the size of the tensor or of a chunk in bytes exceeds an
// int64. Error(kUnsupported) for compressed and filtered arrays, other versions of zarr, and dtypes
// that no tensor can have.
ArrayMetadata parse_array(ByteView text, const std::string& file);

// The same bytes that zarr 2 writes for the array. name_of(dtype) must have a value.
Bytes write_array(const ArrayMetadata& array);

}  // namespace tilestone::zarr
