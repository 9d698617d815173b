// Writes a whole checkpoint with a format's own functions into memory, as one rank would.
#pragma once

#include <string>

#include "tilestone/base/file_image.h"
#include "tilestone/format/format.h"
#include "tilestone/state/state_dict.h"

namespace tilestone::torch_dist {

// What a directory of these files looks like to a format.
DirectoryFiles directory_of(const FileImage& files);
// What a format makes of them.
Metadata parse(const Format& format, const FileImage& files);

// The files of a checkpoint of `state`, in PyTorch's dialect.
FileImage write_checkpoint(const Format& format, const StateDict& state,
                           const std::string& save_id);

}  // namespace tilestone::torch_dist
