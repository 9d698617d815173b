#include "tilestone/base/error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace tilestone::log_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

// Collects messages while it exists, and then restores the level and the sink.
class LogTest : public ::testing::Test {
 protected:
  LogTest() {
    set_log_sink([this](LogLevel level, std::string_view message) {
      messages_.emplace_back(level, message);
    });
  }
  ~LogTest() override {
    set_log_sink({});
    set_log_level(before_);
  }

  std::vector<std::pair<LogLevel, std::string>> messages_;

 private:
  const LogLevel before_ = set_log_level(LogLevel::kWarning);
};

TEST_F(LogTest, DropsWhatIsBelowTheLevel) {
  log(LogLevel::kInfo, "quiet");
  log(LogLevel::kWarning, "heard");
  EXPECT_EQ(set_log_level(LogLevel::kDebug), LogLevel::kWarning);
  log(LogLevel::kDebug, "heard, too");
  set_log_level(LogLevel::kOff);
  log(LogLevel::kError, "quiet");
  log(LogLevel::kOff, "quiet");
  EXPECT_THAT(messages_,
              ElementsAre(Pair(LogLevel::kWarning, "heard"), Pair(LogLevel::kDebug, "heard, too")));
}

TEST_F(LogTest, LogOnceSaysAMessageOnce) {
  log_once(LogLevel::kInfo, "log_test: once");  // below the level: does not count as logged
  for (int i = 0; i < 3; ++i) log_once(LogLevel::kWarning, "log_test: once");
  log_once(LogLevel::kWarning, "log_test: another");
  EXPECT_EQ(messages_.size(), 2u);
}

TEST_F(LogTest, MessagesAreNotFormats) {
  log(LogLevel::kError, "100 % {} {0}");
  EXPECT_THAT(messages_, ElementsAre(Pair(LogLevel::kError, "100 % {} {0}")));
}

TEST_F(LogTest, TheSinkIsCalledOneCallAtATime) {
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([] {
        for (int round = 0; round < 200; ++round) log(LogLevel::kError, "message");
      });
    }
  }
  EXPECT_EQ(messages_.size(), 800u);
}

TEST_F(LogTest, WithoutASinkMessagesGoToStandardError) {
  set_log_sink({});
  ::testing::internal::CaptureStderr();
  log(LogLevel::kWarning, "seen {}");
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("tilestone warning: seen {}\n"));
  EXPECT_TRUE(messages_.empty());
}

}  // namespace tilestone::log_test
