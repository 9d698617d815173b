#include "tilestone/base/host.h"

#include <pwd.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <vector>

namespace tilestone {

std::string host_identity() {
  std::string boot_id;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot_id);
  return boot_id + " " + host_name();
}

std::string host_name() {
  char name[HOST_NAME_MAX + 1] = "";
  gethostname(name, sizeof name - 1);
  return name;
}

std::string this_process() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  char since[32];
  const size_t length = std::strftime(since, sizeof since, "%Y-%m-%d %H:%M:%S UTC", &utc);
  return "process " + std::to_string(::getpid()) + " on " + host_name() + " since " +
         std::string(since, length);
}

uint64_t max_open_files() {
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return UINT64_MAX;
  return limit.rlim_cur;
}

std::string home_directory(const std::string& user) {
  if (user.empty()) {
    const char* const home = std::getenv("HOME");
    if (home != nullptr && home[0] == '/') return home;
  }
  constexpr size_t kMaxEntryBytes = 1u << 20;  // bytes of one user's entry
  passwd entry;
  passwd* found = nullptr;
  for (std::vector<char> text(1u << 12); text.size() <= kMaxEntryBytes;
       text.resize(2 * text.size())) {
    const int error = user.empty()
                          ? ::getpwuid_r(::geteuid(), &entry, text.data(), text.size(), &found)
                          : ::getpwnam_r(user.c_str(), &entry, text.data(), text.size(), &found);
    if (error == ERANGE) continue;
    return found == nullptr || found->pw_dir == nullptr ? std::string() : found->pw_dir;
  }
  return {};
}

}  // namespace tilestone
