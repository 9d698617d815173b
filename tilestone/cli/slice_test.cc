#include "tilestone/cli/slice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tilestone::cli::slice_test {

using testing::AllOf;
using testing::HasSubstr;

Box box(Dims offset, Dims shape) { return {std::move(offset), std::move(shape)}; }

std::string message_of(const std::string& text, const Dims& shape) {
  try {
    parse_slice(text, shape);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "nothing thrown";
}

TEST(Slice, NothingMeansTheWholeTensor) {
  EXPECT_EQ(parse_slice("", {3, 4}), box({0, 0}, {3, 4}));
  EXPECT_EQ(parse_slice("", {}), box({}, {}));
}

TEST(Slice, PartsNameRangesIndicesAndWholeDims) {
  EXPECT_EQ(parse_slice("1:3, :", {5, 4}), box({1, 0}, {2, 4}));
  EXPECT_EQ(parse_slice("2", {5, 4}), box({2, 0}, {1, 4}));
  EXPECT_EQ(parse_slice(":,1:", {5, 4}), box({0, 1}, {5, 3}));
}

TEST(Slice, NegativeNumbersCountFromTheEndAndEndsAreCut) {
  EXPECT_EQ(parse_slice("-2:", {5}), box({3}, {2}));
  EXPECT_EQ(parse_slice("-1", {5}), box({4}, {1}));
  EXPECT_EQ(parse_slice("3:99", {5}), box({3}, {2}));
  EXPECT_EQ(parse_slice("4:2", {5}).shape, (Dims{0}));
}

TEST(Slice, WhatCannotBeMeantIsNamed) {
  EXPECT_THAT(message_of("5", {5}),
              AllOf(HasSubstr("index 5"), HasSubstr("dim 0"), HasSubstr("size 5")));
  EXPECT_THAT(message_of("0:1,0:1", {5}), AllOf(HasSubstr("2 parts"), HasSubstr("1 dims")));
  EXPECT_THAT(message_of("0:4:2", {5}), HasSubstr("steps"));
  EXPECT_THAT(message_of("x", {5}), AllOf(HasSubstr("\"x\""), HasSubstr("integer")));
  EXPECT_THAT(message_of("1,", {5, 5}), HasSubstr("dim 1"));
}

}  // namespace tilestone::cli::slice_test
