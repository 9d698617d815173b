// For tests: catches the Error that a call throws.
#pragma once

#include <gtest/gtest.h>

#include <utility>

#include "tilestone/base/error.h"

namespace tilestone {

// Returns the Error that call() throws. If it throws none, the test fails.
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
