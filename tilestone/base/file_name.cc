#include "tilestone/base/file_name.h"

#include <algorithm>
#include <string>

#include "tilestone/base/error.h"

namespace tilestone {
namespace {

[[noreturn]] void refuse_name(std::string_view name, const char* why) {
  throw Error(ErrorCode::kUnsafe, std::string("unsafe file name: ") + why).with_file(name);
}

}  // namespace

void check_file_name(std::string_view name) {
  if (name.empty()) refuse_name(name, "it is empty");
  if (name.front() == '/') refuse_name(name, "it is absolute");
  if (name.find('\0') != std::string_view::npos) refuse_name(name, "it contains a NUL character");
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('/', begin), name.size());
    const std::string_view component = name.substr(begin, end - begin);
    if (component.empty()) refuse_name(name, "it contains an empty component");
    if (component == ".") refuse_name(name, "it contains the component \".\"");
    if (component == "..") refuse_name(name, "it contains the component \"..\"");
    begin = end + 1;
  }
}

}  // namespace tilestone
