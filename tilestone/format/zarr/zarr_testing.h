// A zarr checkpoint in memory, read and written with the format's own functions alone.
#pragma once

#include <string>

#include "tilestone/base/file_image.h"
#include "tilestone/format/format.h"

namespace tilestone::zarr {

// What a directory of these files looks like to the format, and what the format makes of it.
DirectoryFiles directory_of(const FileImage& files);
Metadata parse(const FileImage& files);

// The whole tensor, C-contiguous, from the places that the format names.
Bytes assemble(const Metadata& metadata, const StoredTensor& tensor, const FileImage& files);

// The files of a checkpoint of these items, as one rank would write them: every tensor's pieces
// cover it. Throws what the format throws.
FileImage write(Items items);

}  // namespace tilestone::zarr
