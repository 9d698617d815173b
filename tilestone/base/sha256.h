// SHA-256, computed by OpenSSL, which uses the processor's instructions for it.
#pragma once

#include <memory>
#include <string>

#include "tilestone/base/bytes.h"

namespace tilestone {

std::string hex(ByteView bytes);  // lower-case digits

class Sha256 {
 public:
  Sha256();
  ~Sha256();

  void add(ByteView bytes);
  // The hash of everything that was added: 64 lower-case hex digits. Nothing may be added after it.
  std::string hex();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tilestone
