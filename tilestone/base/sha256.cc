#include "tilestone/base/sha256.h"

#include <array>
#include <cstddef>

// The functions for this one hash need no more of the library, which a wheel carries.
#define OPENSSL_SUPPRESS_DEPRECATED
#include <openssl/sha.h>

namespace tilestone {

struct Sha256::State {
  SHA256_CTX context = {};
};

Sha256::Sha256() : state_(std::make_unique<State>()) { SHA256_Init(&state_->context); }
Sha256::~Sha256() = default;

void Sha256::add(ByteView bytes) { SHA256_Update(&state_->context, bytes.data(), bytes.size()); }

std::string Sha256::hex() {
  std::array<std::byte, SHA256_DIGEST_LENGTH> found = {};
  SHA256_Final(reinterpret_cast<unsigned char*>(found.data()), &state_->context);
  return tilestone::hex(found);
}

std::string hex(ByteView bytes) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text;
  for (const std::byte byte : bytes) {
    text += kDigits[std::to_integer<unsigned>(byte) >> 4];
    text += kDigits[std::to_integer<unsigned>(byte) & 15];
  }
  return text;
}

}  // namespace tilestone
