// What this process takes while it works, as the kernel counts it.
#pragma once

#include <cstdint>
#include <functional>

namespace tilestone {

// The most memory beyond what was resident before that `work` makes resident, bytes.
uint64_t peak_of(const std::function<void()>& work);

}  // namespace tilestone
