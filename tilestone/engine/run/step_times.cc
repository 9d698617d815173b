#include <algorithm>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/size_text.h"
#include "tilestone/engine/run/step_times_internal.h"

namespace tilestone::engine {

void StepTimes::add(std::string_view step, Clock::time_point began) {
  using std::chrono::duration_cast, std::chrono::microseconds;
  const Clock::duration length = Clock::now() - began;
  const auto micros = duration_cast<microseconds>(length).count();
  const auto now =
      duration_cast<microseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  const double seconds = std::chrono::duration<double>(length).count();
  steps_.push_back({std::string(step), seconds});
  reported_.push_back({std::string(step),
                       static_cast<uint64_t>(std::max(now - micros, decltype(now){0})),
                       static_cast<uint64_t>(micros)});
  log(LogLevel::kDebug, name_ + ": " + std::string(step) + " took " + human_seconds(seconds));
}

void StepTimes::add_earlier(std::string_view step, double seconds) {
  if (seconds > 0) steps_.push_back({std::string(step), seconds});
}

double StepTimes::seconds() const {
  double sum = 0;
  for (const StepTime& step : steps_) sum += step.seconds;
  return sum;
}

std::string StepTimes::text() const {
  std::string text;
  for (const StepTime& step : steps_) {
    text += (text.empty() ? "" : ", ") + step.step + " " + human_seconds(step.seconds);
  }
  return text;
}

void log_ended(const StepTimes& steps, std::string_view done, uint64_t bytes, std::string_view by,
               bool coordinator) {
  const double seconds = steps.seconds();
  const double rate = seconds > 0 ? static_cast<double>(bytes) / seconds : 0;
  log(coordinator ? LogLevel::kInfo : LogLevel::kDebug,
      std::string(done) + ": " + human_bytes(bytes) + " " + std::string(by) + " in " +
          human_seconds(seconds) + ", " + human_bytes(static_cast<uint64_t>(rate)) + "/s (" +
          steps.text() + ")");
}

}  // namespace tilestone::engine
