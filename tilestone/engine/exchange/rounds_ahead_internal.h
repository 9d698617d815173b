// The rounds of an owner that reads into the page cache, made by a thread of their own, so that the
// disk has work while the ranks exchange messages and copy.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/engine/exchange/exchange_owner_internal.h"

namespace tilestone::engine {

class RoundsAhead {
 public:
  // Makes rounds until the owner has no more, or one fails. The owner outlives this object and is
  // nobody else's until then.
  explicit RoundsAhead(TileOwner& owner);
  // Waits for the round that is being made.
  ~RoundsAhead();
  RoundsAhead(const RoundsAhead&) = delete;
  RoundsAhead& operator=(const RoundsAhead&) = delete;

  // The next round's messages; waits for them. After the last round: of an empty one. Throws what
  // the round failed with.
  std::vector<Bytes> take();

 private:
  void make();

  TileOwner& owner_;
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
