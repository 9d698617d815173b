// Ends a command that writes in order when a signal asks the process to end.
#pragma once

#include <functional>
#include <memory>

#include "tilestone/tilestone.h"

namespace tilestone::cli {

// Calls `work`. If SIGINT, SIGTERM or SIGHUP comes meanwhile, requests the interrupt, waits for
// `work` to throw, and ends the process by this signal, as if nothing had been done about it. A
// second signal ends the process at once. Signals that the process ignores stay ignored. At most
// one call at a time.
void end_in_order(const std::function<void(std::shared_ptr<const Interrupt>)>& work);

}  // namespace tilestone::cli
