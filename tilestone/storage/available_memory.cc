#include <algorithm>
#include <fstream>
#include <optional>
#include <string_view>

#include "tilestone/storage/available_memory_internal.h"

namespace tilestone {
namespace {

// The files of a version of control groups.
struct CgroupFiles {
  const char* mount;
  const char* limit;
  const char* usage;
  const char* cached[2];  // lines of memory.stat
};
constexpr CgroupFiles kV1 = {"/sys/fs/cgroup/memory",
                             "/memory.limit_in_bytes",
                             "/memory.usage_in_bytes",
                             {"total_inactive_file", "total_active_file"}};
constexpr CgroupFiles kV2 = {
    "/sys/fs/cgroup", "/memory.max", "/memory.current", {"inactive_file", "active_file"}};

// The file's number. nullopt if there is no such file or it says "max".
std::optional<uint64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  uint64_t number = 0;
  if (file >> number) return number;
  return std::nullopt;
}

// The number after the word `name` at the beginning of a line.
std::optional<uint64_t> number_of(const std::string& path, std::string_view name) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    if (!line.starts_with(name) || line.size() == name.size()) continue;
    const char after = line[name.size()];
    if (after != ' ' && after != ':') continue;
    return std::strtoull(line.c_str() + name.size() + 1, nullptr, 10);
  }
  return std::nullopt;
}

std::optional<uint64_t> left_in_group(const std::string& directory, const CgroupFiles& files) {
  const auto limit = number_in(directory + files.limit);
  const auto usage = number_in(directory + files.usage);
  if (!limit || !usage) return std::nullopt;
  uint64_t cached = 0;
  for (const char* name : files.cached) {
    cached += number_of(directory + "/memory.stat", name).value_or(0);
  }
  const uint64_t used = *usage - std::min(cached, *usage);
  return *limit - std::min(used, *limit);
}

// `group`: the path of the process's group below the mount. In a container it may be the path
// outside, of which only the mount itself exists here.
uint64_t left_in_groups(const std::string& root, std::string group, const CgroupFiles& files) {
  uint64_t left = UINT64_MAX;
  while (true) {
    while (group.ends_with('/')) group.pop_back();
    left = std::min(left, left_in_group(root + files.mount + group, files).value_or(left));
    if (group.empty()) return left;
    const size_t slash = group.rfind('/');
    group.resize(slash == std::string::npos ? 0 : slash);
  }
}

// Whether the comma-separated controllers of a line of /proc/self/cgroup include the memory's.
bool names_memory(std::string_view controllers) {
  return ("," + std::string(controllers) + ",").find(",memory,") != std::string::npos;
}

}  // namespace

uint64_t available_memory(const std::string& root) {
  uint64_t available = number_of(root + "/proc/meminfo", "MemAvailable").value_or(0) * 1024;
  std::ifstream groups(root + "/proc/self/cgroup");
  std::string line;  // hierarchy:controllers:path
  while (std::getline(groups, line)) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string_view controllers =
        std::string_view(line).substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) available = std::min(available, left_in_groups(root, path, kV2));
    if (names_memory(controllers)) available = std::min(available, left_in_groups(root, path, kV1));
  }
  return available;
}

}  // namespace tilestone
