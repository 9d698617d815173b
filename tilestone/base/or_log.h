// Work whose failure nobody needs to hear of but the log.
#pragma once

#include <string>

#include "tilestone/base/error.h"

namespace tilestone {

// Runs `work`. An Error is logged as "WHAT: ERROR". Returns whether there was none.
template <typename Work>
bool or_log(LogLevel level, const std::string& what, const Work& work) {
  try {
    work();
    return true;
  } catch (const Error& error) {
    log(level, what + ": " + error.what());
    return false;
  }
}

}  // namespace tilestone
