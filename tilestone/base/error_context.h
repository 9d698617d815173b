// Says where what failed.
#pragma once

#include <string_view>

#include "tilestone/base/error.h"

namespace tilestone {

// What `body` returns. What it throws becomes an Error (current_error()) that names the key, unless
// it names one.
template <typename Body>
decltype(auto) with_key(std::string_view key, const Body& body) {
  try {
    return body();
  } catch (...) {
    throw current_error().with_key(key);
  }
}

// The same with a file.
template <typename Body>
decltype(auto) with_file(std::string_view file, const Body& body) {
  try {
    return body();
  } catch (...) {
    throw current_error().with_file(file);
  }
}

// The same with both.
template <typename Body>
decltype(auto) with_key_and_file(std::string_view key, std::string_view file, const Body& body) {
  return with_key(key, [&]() -> decltype(auto) { return with_file(file, body); });
}

}  // namespace tilestone
