// PyTorch's torch_dist format (torch.distributed.checkpoint), read and written without torch. The
// spec is docs/formats/torch_dist.md.
#pragma once

#include <memory>

#include "tilestone/format/format.h"

namespace tilestone {

std::shared_ptr<const Format> torch_dist_format();

}  // namespace tilestone
