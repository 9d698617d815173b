#include "tilestone/base/sha256.h"

#include <array>
#include <cstdint>

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
  constexpr const char* kDigits = "0123456789abcdef";
  std::array<uint8_t, SHA256_DIGEST_LENGTH> found = {};
  SHA256_Final(found.data(), &state_->context);
  std::string text;
  for (const uint8_t byte : found) {
    text.push_back(kDigits[byte >> 4]);
    text.push_back(kDigits[byte & 15]);
  }
  return text;
}

}  // namespace tilestone
