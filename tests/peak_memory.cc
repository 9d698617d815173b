#include "tests/peak_memory.h"

#include <fstream>
#include <string>

#include "tilestone/base/error.h"

namespace tilestone {
namespace {

// A field of /proc/self/status, in bytes.
uint64_t status(const std::string& field) {
  std::ifstream file("/proc/self/status");
  for (std::string name; file >> name;) {
    uint64_t kib = 0;
    if (name == field + ":" && file >> kib) return kib << 10;
    std::getline(file, name);
  }
  throw Error(ErrorCode::kInternal, "no " + field + " in /proc/self/status");
}

}  // namespace

uint64_t peak_of(const std::function<void()>& work) {
  std::ofstream("/proc/self/clear_refs") << "5";  // resets the peak
  const uint64_t before = status("VmRSS");
  work();
  return status("VmHWM") - before;
}

}  // namespace tilestone
