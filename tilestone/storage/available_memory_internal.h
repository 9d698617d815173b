// The memory that is left for the page cache.
#pragma once

#include <cstdint>
#include <string>

namespace tilestone {

// The memory in bytes that this process can still get without swapping: the least of the machine's
// MemAvailable and, for the process's control group and each group above it (cgroup v1 or v2), the
// group's limit less what it uses. Pages of the page cache do not count as used. 0 if the machine
// does not say. `root` stands before /proc and /sys, for tests.
uint64_t available_memory(const std::string& root = "");

}  // namespace tilestone
