// For tests: the error of every rank.
#pragma once

#include <exception>
#include <functional>
#include <vector>

#include "tilestone/comm/communicator.h"

namespace tilestone {

// As run_ranks(), but returns what each rank threw (null: nothing).
std::vector<std::exception_ptr> run_ranks_collect(int n,
                                                  const std::function<void(Communicator)>& body);

}  // namespace tilestone
