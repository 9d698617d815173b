// CallPort: the part of a communicator with which ranks agree on calls (call.h). A communicator
// works without one, but then all ranks must make the same calls in the same order.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/deadline.h"
#include "tilestone/base/error.h"

namespace tilestone {

namespace comm_internal {
struct Hello;
}

// What a rank's end of a group remembers from one call to the next. Exists as long as the group in
// this process. If a process has several ends on one rank of a group, they share it. Only call.cc
// and arrival.cc use the members.
struct CallMemory {
  CallMemory();
  ~CallMemory();
  CallMemory(const CallMemory&) = delete;
  CallMemory& operator=(const CallMemory&) = delete;

  // One call at a time. `caller` is the thread that makes a call now.
  std::mutex mutex;
  std::condition_variable freed;
  std::optional<std::thread::id> caller;

  // Coordinator: by rank, those that wait for an answer, and those that left and have sent nothing
  // since. Member: at most rank 0, if the coordinator left a call and has sent nothing since.
  std::map<int, comm_internal::Hello> waiting;
  // Coordinator: by rank, the nonce of the last hello that it answered.
  std::map<int, uint64_t> answered;
  // Coordinator: the ranks that it has sent nothing since it left a call.
  std::set<int> unaware;
  // How long the others wait for a rank that has left and may arrive again.
  std::chrono::duration<double> grace{5};
};

// A short message that is not part of an operation. Only the newest notice from one rank to another
// counts, so a communicator may drop older ones.
struct Notice {
  int rank = 0;  // the receiver; for a received notice, the sender
  Bytes bytes;   // a few KiB at most
  // Received only: that rank is known to have ended. The text is the reason, "" if unknown.
  std::optional<std::string> lost;
};

// Used by one thread at a time: the thread that makes the call.
class CallPort {
 public:
  virtual ~CallPort() = default;

  // Sends notices: rank 0 to any other rank, the others to rank 0. Does not wait for the receivers.
  // If the transport itself blocks, waits until the deadline at most, and then throws.
  virtual void post(std::vector<Notice> notices, Deadline deadline) = 0;
  // The notices that have arrived since the last newest(); those of one rank keep their order. If
  // there are none, waits for the first one until the deadline, and then returns none. If asking
  // the transport takes time, waits for its answer until `limit` at most, and then throws.
  virtual std::vector<Notice> newest(Deadline deadline, Deadline limit) = 0;

  // The number of this rank's last operation or call.
  virtual uint64_t last_operation() const = 0;
  // Begins call number `call`. Its operations continue from that number. No rank has used this or a
  // larger number yet.
  virtual void enter(uint64_t call) = 0;
  // Makes every operation of the last call that was entered throw `why`, on every rank, now and
  // later, except operations whose messages have arrived already.
  virtual void abort(const Error& why) = 0;
  // Rank 0: its next scatter or broadcast is the last message of the call. Where messages are lost
  // when the process of rank 0 ends, that operation returns on rank 0 only after every other rank
  // has taken its message, or after a short time. It does not fail because a rank hasn't.
  virtual void announce_last() {}
  // Ends the call on this rank: no operation of it follows.
  virtual void leave() = 0;

  // Reports ranks that did not arrive at a call in time.
  virtual void missed(const std::vector<int>& ranks) { static_cast<void>(ranks); }
  virtual CallMemory& memory() = 0;
};

}  // namespace tilestone
