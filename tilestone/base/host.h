// The machine that a process runs on, and what it gives the process.
#pragma once

#include <cstdint>
#include <string>

namespace tilestone {

// The kernel's boot id (if the system has one) and the host name. All processes under the same
// running kernel and host name get the same text; all others get a different one.
std::string host_identity();

// The name that the command `hostname` prints, to show to people.
std::string host_name();

// "process 123 on node7 since 2026-11-27 02:41:03 UTC", the time being now.
std::string this_process();

// The limit of this process on open files (`ulimit -n`). UINT64_MAX: none, or not known.
uint64_t max_open_files();

// The home directory of a user, or of this process's if `user` is empty: $HOME if that is set. "":
// not known.
std::string home_directory(const std::string& user = "");

}  // namespace tilestone
