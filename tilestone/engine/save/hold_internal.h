// A save in the background that reports and publishes only when its program says so: when one of
// Megatron-Core's queues finalizes it.
#pragma once

#include <memory>

#include "tilestone/base/deadline.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/run/pending_internal.h"

namespace tilestone::engine {

// One rank's. Such a save is not its session's last one: the next one does not wait for it.
struct Hold {
  // This rank's data files are durable. Does not end if the writing has failed.
  const std::shared_ptr<Pending::State> written =
      std::make_shared<Pending::State>("the writing of a save", Deadline::never());
  // The program has the save published.
  const std::shared_ptr<Pending::State> released =
      std::make_shared<Pending::State>("the hold of a save", Deadline::never());

  // On the save's thread, between writing and reporting.
  void pass(const Deadline& deadline) const {
    written->end(nullptr);
    if (released->wait(deadline)) return;
    throw Error(ErrorCode::kTimeout, "the save's deadline passed before it was finalized");
  }
};

}  // namespace tilestone::engine
