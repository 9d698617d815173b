// Numbers for people, and ranks.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tilestone {

// "1.50 GiB", "640 B".
std::string human_bytes(uint64_t bytes);
// "12,345"
std::string grouped(uint64_t number);
// "1 tensor", "2,000 tensors".
std::string counted(uint64_t number, std::string_view noun);
// "0.004 s", "3.92 s", "85 s".
std::string human_seconds(double seconds);
// "rank 3", "ranks 1, 2 and 3", "ranks 0, 1, 2, 3 and 60 more". `most`: how many are listed.
std::string ranks_text(const std::vector<int>& ranks, size_t most = 4);

}  // namespace tilestone
