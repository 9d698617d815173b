// CallPort: what a communicator offers beside its operations, so that calls (call.h) can be agreed
// on. A communicator without one still works; its ranks must then make the same calls.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
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

// What a rank's end of a group remembers from one call to the next. Lives as long as the group
// does in this process; all ends of a process on one rank of a group share it. Its members are
// call.cc's business.
struct CallMemory {
  CallMemory();
  ~CallMemory();
  CallMemory(const CallMemory&) = delete;
  CallMemory& operator=(const CallMemory&) = delete;

  // One call at a time: who makes it now.
  std::mutex mutex;
  std::condition_variable freed;
  std::optional<std::thread::id> caller;

  std::deque<uint64_t> recent;  // fingerprints of the last calls, newest first
  uint64_t since = 0;           // how many of them came after the last call that all ranks made
  uint64_t agreed = 0;          // number of that one
  // Coordinator: who has come and waits for an answer, and who has left and was not heard of since.
  // Member: only rank 0, when the coordinator has left a call and was not heard of since.
  std::map<int, comm_internal::Hello> waiting;
  // Coordinator: the nonces of the hellos that it answered last; and the ranks that have heard
  // nothing of it since it left a call.
  std::map<int, uint64_t> answered;
  std::set<int> unaware;
  // How long those who have come wait for a rank that has left and may come again.
  std::chrono::duration<double> grace{5};
};

// A short message beside the operations. Of those from one rank to another only the newest counts:
// a communicator may drop older ones.
struct Notice {
  int rank = 0;  // to whom, or from whom
  Bytes bytes;   // a few KiB at most
  // Received: that rank is known to be gone for ever, and why, as far as it is known.
  std::optional<std::string> lost;
};

// Used by one thread at a time, the one that makes the call.
class CallPort {
 public:
  virtual ~CallPort() = default;

  // Rank 0 sends to any other rank, the others send to rank 0. Does not wait for them; where it
  // waits for what carries the notices, until the deadline at the longest, and then throws.
  virtual void post(std::vector<Notice> notices, Deadline deadline) = 0;
  // The notices that came since the last call of newest(), in the order in which they came from
  // each rank; waits for the first, until the deadline, and then returns nothing.
  // Where asking takes time itself, an answer is waited for until `limit`, and then this throws.
  virtual std::vector<Notice> newest(Deadline deadline, Deadline limit) = 0;

  // The number of this rank's last operation or call.
  virtual uint64_t last_operation() const = 0;
  // The operations of call number `call` begin: they are numbered on from it. No rank has used it
  // or a larger number yet.
  virtual void enter(uint64_t call) = 0;
  // Operations of the call that was entered last end with `why` on every rank, now and later, but
  // for those whose messages are there already.
  virtual void abort(const Error& why) = 0;
  // The call's operations are over on this rank.
  virtual void leave() = 0;

  // These ranks did not come to a call in time.
  virtual void missed(const std::vector<int>& ranks) { static_cast<void>(ranks); }
  virtual CallMemory& memory() = 0;
};

}  // namespace tilestone
