// Writes a whole checkpoint into memory with the functions of a format, as a save of one rank does.
#pragma once

#include <string>

#include "tilestone/base/file_image.h"
#include "tilestone/format/format.h"
#include "tilestone/state/state_dict.h"

namespace tilestone::torch_dist {

// A directory with these files, as formats see it.
DirectoryFiles directory_of(const FileImage& files);
// The metadata that a format parses from them.
Metadata parse(const Format& format, const FileImage& files);

// The files of a checkpoint of `state`, in PyTorch's dialect.
FileImage write_checkpoint(const Format& format, const StateDict& state,
                           const std::string& save_id);

}  // namespace tilestone::torch_dist
