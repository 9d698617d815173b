// Says where what failed.
#pragma once

#include <string_view>

#include "tilestone/base/error.h"

namespace tilestone {

// What `body` returns. An Error that it throws gets the file's name, if it names none.
template <typename Body>
decltype(auto) with_file(std::string_view file, const Body& body) {
  try {
    return body();
  } catch (Error& error) {
    error.with_file(file);
    throw;
  }
}

// The same with a key.
template <typename Body>
decltype(auto) with_key(std::string_view key, const Body& body) {
  try {
    return body();
  } catch (Error& error) {
    error.with_key(key);
    throw;
  }
}

}  // namespace tilestone
