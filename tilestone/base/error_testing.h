// For tests: catches the Error that a call throws, and matches its facts rather than its wording.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cctype>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"

namespace tilestone {

// Returns the Error that call() throws. If it throws none, the test fails.
template <typename Call>
Error error_of(Call&& call) {
  try {
    std::forward<Call>(call)();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "no Error was thrown";
  return {ErrorCode::kInternal, "no error"};
}

// How GoogleTest prints an Error.
inline void PrintTo(const Error& error, std::ostream* out) {
  *out << to_string(error.code()) << ": " << error.what();
}

// Where the first occurrence of `fact` as whole words ends in `text`, from position `begin` on.
// npos: there is none. "rank 1" is not in "rank 12".
inline size_t end_of_fact(std::string_view text, std::string_view fact, size_t begin) {
  const auto joined = [&](size_t at) {  // one word contains the characters before and at `at`
    const auto in_word = [&](size_t i) {
      return i < text.size() &&
             (std::isalnum(static_cast<unsigned char>(text[i])) || text[i] == '_');
    };
    return at > 0 && in_word(at - 1) && in_word(at);
  };
  for (size_t at = begin; (at = text.find(fact, at)) != std::string_view::npos; ++at) {
    if (!joined(at) && !joined(at + fact.size())) return at + fact.size();
  }
  return std::string_view::npos;
}

MATCHER_P(MentionsAll, facts, "mentions in this order " + testing::PrintToString(facts)) {
  size_t end = 0;
  for (const std::string& fact : facts) {
    end = end_of_fact(arg, fact, end);
    if (end != std::string_view::npos) continue;
    *result_listener << "\"" << fact << "\" is not there";
    return false;
  }
  return true;
}

// Matches a text that contains each of these facts (a rank, a key, a box, an option), in this order
// and as whole words.
template <typename... Facts>
auto Mentions(Facts&&... facts) {
  return MentionsAll(std::vector<std::string>{std::forward<Facts>(facts)...});
}

// Matches an Error with this code and key ("": no key) whose message mentions the facts.
template <typename... Facts>
auto IsError(ErrorCode code, std::string_view key, Facts&&... facts) {
  return testing::AllOf(
      testing::Property("code", &Error::code, code),
      testing::Property("key", &Error::key, std::string(key)),
      testing::Property("message", &Error::message, Mentions(std::forward<Facts>(facts)...)));
}

}  // namespace tilestone
