// Finds out whether it is slower to leave what is read in the page cache than to read past it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace tilestone {

// A trial reads windows of one batch alternately into the page cache and past it: keep, bypass,
// keep, bypass, keep. The verdict is to bypass if each bypassing window was clearly faster than
// each keeping one. It is to keep as soon as one was not, so that most trials end after two
// windows, and a disturbance while one window is read does not change the verdict to bypass.
class KeepTrial {
 public:
  static constexpr double kClearly = 1.15;  // how many times as fast bypassing must be
  static constexpr size_t kWindows = 5;

  explicit KeepTrial(size_t workers);

  uint64_t window() const { return window_; }                // bytes
  uint64_t worth_trying() const { return kMany * window_; }  // bytes; smaller batches are kept
  bool keeps() const { return rates_.size() % 2 == 0; }      // how to read the next window
  // A window has been read in `seconds`; `cold` of its bytes were not in the page cache. It does
  // not count if a large part was.
  void measured(uint64_t cold, uint64_t bytes, double seconds);
  std::optional<bool> verdict() const;  // whether to keep

 private:
  static constexpr uint64_t kMany = 16;  // windows

  const uint64_t window_;
  std::vector<double> rates_;  // bytes per second
};

}  // namespace tilestone
