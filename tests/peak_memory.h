// The memory use of this process as counted by the kernel.
#pragma once

#include <cstdint>
#include <functional>

namespace tilestone {

// The peak of resident memory during `work` minus the resident memory before it, in bytes.
uint64_t peak_of(const std::function<void()>& work);

}  // namespace tilestone
