#include "tilestone/base/uuid.h"

#include <random>
#include <string_view>

namespace tilestone {

std::string random_uuid() {
  constexpr std::string_view kHex = "0123456789abcdef";
  constexpr std::string_view kTemplate = "xxxxxxxx-xxxx-4xxx-yxxx-xxxxxxxxxxxx";
  std::random_device random;
  std::string id(kTemplate);
  for (char& c : id) {
    const unsigned digit = random() & 15u;
    if (c == 'x') c = kHex[digit];
    if (c == 'y') c = kHex[8 + (digit & 3u)];
  }
  return id;
}

}  // namespace tilestone
