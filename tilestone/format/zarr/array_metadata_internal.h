// `.zarray`: the file that describes one array of zarr v2. The spec is docs/formats/zarr.md.
#pragma once

#include <string>

#include "tilestone/base/bytes.h"
#include "tilestone/base/dtype.h"
#include "tilestone/geometry/dims.h"

namespace tilestone::zarr {

struct ArrayMetadata {
  DType dtype = DType::kFloat32;
  Dims shape;
  Dims chunk_shape;      // elements, as many dims as `shape`, all >= 1
  bool fortran = false;  // a chunk's elements lie in Fortran order
  char separator = '.';  // between the numbers of a chunk's name: '.' or '/'

  uint64_t chunk_bytes() const;  // of every chunk's file, at the edges too
  Dims chunk_strides() const;    // elements
  friend bool operator==(const ArrayMetadata&, const ArrayMetadata&) = default;
};

// The text of a `.zarray` file. Errors name `file`: kCorrupt for what is no description of an array
// (bytes of tensor and chunk fit an int64), kUnsupported for compressed and filtered arrays, other
// versions of zarr, dtypes that no tensor has.
ArrayMetadata parse_array(ByteView text, const std::string& file);

// Byte for byte what zarr 2 writes for the same array. The dtype has a name_of().
Bytes write_array(const ArrayMetadata& array);

}  // namespace tilestone::zarr
