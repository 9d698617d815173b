// What a call throws, for tests that look at its parts.
#pragma once

#include <gtest/gtest.h>

#include <utility>

#include "tilestone/base/error.h"

namespace tilestone {

// The Error that call() throws. The test fails where it throws none.
template <typename Call>
Error error_of(Call&& call) {
  try {
    std::forward<Call>(call)();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "no Error was thrown";
  return {ErrorCode::kInternal, "no error"};
}

}  // namespace tilestone
