#pragma once

#include <string>

namespace tilestone {

// A random UUID, version 4, as text: the form of save ids.
std::string random_uuid();

}  // namespace tilestone
