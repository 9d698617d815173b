// What the folder of a run's step holds.
#pragma once

#include <memory>
#include <optional>

#include "tilestone/base/error.h"
#include "tilestone/engine/checkpoint_manager.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

struct Look {
  StepInfo info;
  std::optional<Error> error = std::nullopt;  // why the step is damaged
};
// Fills everything but the step, the name and whether it is a link. Throws only what prevents
// listing the folder.
Look look_at(const std::shared_ptr<Storage>& storage, StepInfo info);

// Whether there is something that may be a checkpoint: one that exists or is damaged. Opens none.
bool may_be_checkpoint(Storage& storage);

}  // namespace tilestone::engine
