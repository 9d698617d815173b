// Numbers for people.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tilestone {

// "1.50 GiB", "640 B".
std::string human_bytes(uint64_t bytes);
// "12,345"
std::string grouped(uint64_t number);
// "1 tensor", "2,000 tensors".
std::string counted(uint64_t number, std::string_view noun);
// "0.004 s", "3.92 s", "85 s".
std::string human_seconds(double seconds);

}  // namespace tilestone
