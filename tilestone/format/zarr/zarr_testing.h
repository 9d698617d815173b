// Reads and writes a zarr checkpoint in memory with the format's own functions.
#pragma once

#include <string>

#include "tilestone/base/file_image.h"
#include "tilestone/format/format.h"

namespace tilestone::zarr {

// A directory with these files, as the format sees it.
DirectoryFiles directory_of(const FileImage& files);
// The metadata that the format parses from them.
Metadata parse(const FileImage& files);

// Reads the whole tensor, C-contiguous, from the places that the format returns.
Bytes assemble(const Metadata& metadata, const StoredTensor& tensor, const FileImage& files);

// The files of a checkpoint of these items, as a save of one rank writes them. The pieces of each
// tensor must cover it. Passes on the format's errors.
FileImage write(Items items);

}  // namespace tilestone::zarr
