// Which machine a process runs on.
#pragma once

#include <string>

namespace tilestone {

// The same text in all processes under one running kernel and host name, another text everywhere
// else: the kernel's boot id (where the system has one) and the host name.
std::string host_identity();

// As `hostname` gives it, for people.
std::string host_name();

}  // namespace tilestone
