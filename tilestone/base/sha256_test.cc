#include "tilestone/base/sha256.h"

#include <gtest/gtest.h>

#include <string>

namespace tilestone {
namespace {

std::string sha256_of(const std::string& text) {
  Sha256 hash;
  for (const char& one : text) hash.add(std::as_bytes(std::span(&one, 1)));
  return hash.hex();
}

// The examples of FIPS 180-4.
TEST(Sha256, MatchesTheStandardsExamples) {
  EXPECT_EQ(Sha256().hex(), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256_of("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
}

}  // namespace
}  // namespace tilestone
