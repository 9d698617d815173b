#pragma once

#include "tilestone/comm/communicator.h"

namespace tilestone {

// A group of one rank.
Communicator solo();

}  // namespace tilestone
