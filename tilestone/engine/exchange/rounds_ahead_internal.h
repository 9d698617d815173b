// Rounds of messages made by a thread of their own, so that the disk has work while the ranks
// exchange messages and copy.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "tilestone/base/bytes.h"

namespace tilestone::engine {

class RoundsAhead {
 public:
  // Calls make while more() says so and none fails. Nobody else calls them, or uses what they use,
  // until the last round is taken.
  RoundsAhead(std::function<bool()> more, std::function<std::vector<Bytes>()> make);
  // Waits for the round that is being made.
  ~RoundsAhead();
  RoundsAhead(const RoundsAhead&) = delete;
  RoundsAhead& operator=(const RoundsAhead&) = delete;

  // The next round's messages; waits for them. After the last round: of an empty one. Throws what
  // the round failed with.
  std::vector<Bytes> take();

 private:
  void run();

  const std::function<bool()> more_;
  const std::function<std::vector<Bytes>()> make_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::vector<Bytes>> rounds_;
  std::exception_ptr failure_;
  bool ended_ = false;    // no round follows those that are there
  bool stopped_ = false;  // none is wanted
  void* const call_;      // whom the thread works for
  std::thread thread_;    // the last member: it uses the others
};

}  // namespace tilestone::engine
