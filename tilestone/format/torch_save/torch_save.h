// Files of torch.save, opened as checkpoints without reading more than their zip directory and
// their pickle. docs/formats/torch_save.md says what their tensors and objects become.
#pragma once

#include <memory>
#include <string_view>

#include "tilestone/format/format.h"

namespace tilestone {

// For reading. Its check() refuses every save: only a conversion writes files of torch.save.
std::shared_ptr<const Format> torch_save_format();

// A storage that shows one file of torch.save lists this name, too. A file of this name does not
// exist: it tells the file from a folder that has no other one.
inline constexpr std::string_view kTorchSaveMark = ":torch_save";

// Whether files of torch.save are named so: ".pt", ".pth", ".bin", ".ckpt".
bool is_torch_save_name(std::string_view name);

}  // namespace tilestone
