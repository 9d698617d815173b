#include "tilestone/base/error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <new>
#include <stdexcept>

#include "tilestone/base/error_testing.h"

namespace tilestone::error_test {

using ::testing::HasSubstr;
using ::testing::Not;

Error full_error() {
  return Error(ErrorCode::kIo, "write failed")
      .with_key("layer.0.weight")
      .with_file("__0_0.distcp")
      .with_rank(3)
      .with_errno(ENOSPC)
      .with_reason(Reason::kUnderWay)
      .with_hint(Hint{{"free some space, or write less with ", "overwrite", "true"}});
}

TEST(Error, SaysWhatWhereAndWhatToTryInOneLine) {
  EXPECT_STREQ(
      full_error().what(),
      "write failed: No space left on device (key layer.0.weight) "
      "(file __0_0.distcp) (rank 3); free some space, or write less with overwrite = true");
}

TEST(Error, ShowsOnlyTheContextThatIsSet) {
  EXPECT_STREQ(Error(ErrorCode::kTimeout, "no answer").what(), "no answer");
  EXPECT_STREQ(Error(ErrorCode::kTimeout, "no answer").with_rank(0).what(), "no answer (rank 0)");
}

TEST(Error, KeepsTheContextOfTheInnermostFrame) {
  Error error = full_error();
  error.with_key("other").with_file("other").with_rank(9).with_errno(EIO).with_hint("other");
  EXPECT_STREQ(error.what(), full_error().what());
}

TEST(Error, ControlCharactersFromAFileCantForgeLines) {
  const Error error = Error(ErrorCode::kCorrupt, "bad name").with_key("a\nERROR: \x1b[31m");
  EXPECT_STREQ(error.what(), "bad name (key a\\nERROR: \\x1b[31m)");
  EXPECT_EQ(error.key(), "a\nERROR: \x1b[31m");
}

TEST(Error, TravelsBetweenRanksWhole) {
  const Error sent = full_error();
  const Error received = Error::decode(sent.encode());
  EXPECT_EQ(received.code(), sent.code());
  EXPECT_EQ(received.message(), sent.message());
  EXPECT_EQ(received.key(), sent.key());
  EXPECT_EQ(received.file(), sent.file());
  EXPECT_EQ(received.rank(), sent.rank());
  EXPECT_EQ(received.hint(), sent.hint());
  EXPECT_EQ(received.reason(), sent.reason());
  EXPECT_EQ(received.sys_errno(), sent.sys_errno());
  EXPECT_STREQ(received.what(), sent.what());
}

ErrorCode code_of_decoding(std::span<const std::byte> bytes) {
  try {
    Error::decode(bytes);
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode::kInternal;
}

TEST(Error, ForeignBytesAreRefusedAtEveryLength) {
  std::vector<std::byte> bytes = full_error().encode();
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(code_of_decoding(std::span(bytes).first(size)), ErrorCode::kCorrupt) << size;
  }
  bytes.push_back(std::byte{0});
  EXPECT_EQ(code_of_decoding(bytes), ErrorCode::kCorrupt);
}

TEST(Error, AnUnknownCodeIsRefused) {
  std::vector<std::byte> bytes = full_error().encode();
  for (const int code : {0, 14, 255}) {
    bytes[1] = static_cast<std::byte>(code);
    EXPECT_EQ(code_of_decoding(bytes), ErrorCode::kCorrupt) << code;
  }
}

TEST(Error, EveryCodeHasAName) {
  for (int code = 1; code <= 13; ++code) {
    EXPECT_THAT(std::string(to_string(static_cast<ErrorCode>(code))), Not("unknown")) << code;
  }
  EXPECT_EQ(to_string(ErrorCode::kInvalidArgument), "invalid_argument");
  EXPECT_EQ(to_string(ErrorCode::kInternal), "internal");
}

template <typename Exception>
Error caught(const Exception& exception) {
  try {
    throw exception;
  } catch (...) {
    return current_error();
  }
}

// The matcher that most tests check messages with.
TEST(Mentions, FindsWholeWordsInTheirOrder) {
  const std::string text = "rank 12 holds box [0:4], rank 3 holds none";
  EXPECT_THAT(text, Mentions("rank 12", "[0:4]", "rank 3"));
  EXPECT_THAT(text, Not(Mentions("rank 1")));
  EXPECT_THAT(text, Not(Mentions("ank 3")));
  EXPECT_THAT(text, Not(Mentions("rank 3", "rank 12")));
  EXPECT_THAT(text, Not(Mentions("rank 3", "rank 3")));
  const Error error = Error(ErrorCode::kIo, text).with_key("w");
  EXPECT_THAT(error, IsError(ErrorCode::kIo, "w", "rank 3"));
  EXPECT_THAT(error, Not(IsError(ErrorCode::kCorrupt, "w", "rank 3")));
  EXPECT_THAT(error, Not(IsError(ErrorCode::kIo, "v", "rank 3")));
  EXPECT_THAT(error, Not(IsError(ErrorCode::kIo, "w", "rank 4")));
}

TEST(CurrentError, IsTheErrorItselfWithItsContext) {
  EXPECT_STREQ(caught(full_error()).what(), full_error().what());
}

TEST(CurrentError, AnExceptionOfTheCallersCodeIsNoDefectOfTilestone) {
  EXPECT_EQ(caught(std::runtime_error("boom")).code(), ErrorCode::kInterrupted);
  EXPECT_STREQ(caught(std::runtime_error("boom")).what(), "boom");
  EXPECT_EQ(caught(std::bad_alloc()).code(), ErrorCode::kIo);
  EXPECT_EQ(caught(std::bad_alloc()).sys_errno(), ENOMEM);
  EXPECT_THAT(caught(std::bad_alloc()).what(), HasSubstr("out of memory"));
  EXPECT_THAT(caught(42).what(), HasSubstr("unknown type"));
}

TEST(CurrentError, TheOriginalExceptionStaysWithTheErrorAndIsRethrown) {
  try {
    try {
      throw caught(42).with_key("k");
    } catch (...) {
      rethrow_cause();
    }
  } catch (const int thrown) {
    EXPECT_EQ(thrown, 42);
  }
  EXPECT_EQ(caught(full_error()).cause(), nullptr);
  EXPECT_EQ(Error::decode(caught(42).encode()).cause(), nullptr);
}

}  // namespace tilestone::error_test
