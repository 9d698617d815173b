// Sends notices between MPI ranks, and the errors that abort a call. Both are short messages with a
// tag of their own, sent and received without blocking.
#pragma once

#include <mpi.h>

#include <functional>
#include <list>
#include <map>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/comm/call_port.h"

namespace tilestone::comm_internal {

enum class NoticeKind : uint8_t { kNotice = 1, kAbort = 2 };

class MpiNotices {
 public:
  // `heard_of` is called with the sender's rank for each message that arrives.
  MpiNotices(std::function<void(int)> heard_of) : heard_of_(std::move(heard_of)) {}
  MpiNotices(const MpiNotices&) = delete;
  MpiNotices& operator=(const MpiNotices&) = delete;

  // `generation`: the same number on all ranks. Messages with another one are dropped.
  void open(MPI_Comm comm, int tag, int rank, int size, uint64_t generation);

  void post(std::vector<Notice> notices);
  // The newest notice of each rank that take() has not returned before.
  std::vector<Notice> take();
  void abort(uint64_t call, const Error& why);
  // If a rank has aborted the call, throws its error.
  void check(uint64_t call) const;

  // Makes progress with all messages, without blocking.
  void progress();
  // Whether MPI may still access the memory of a message.
  bool is_busy() const { return !leaving_.empty() || !coming_.empty(); }
  // Leaks that memory, so that MPI can access it until the process ends.
  void release();

 private:
  struct Message {
    int peer = 0;
    Bytes bytes;
    MPI_Request request = MPI_REQUEST_NULL;
  };
  ByteWriter begin_message(NoticeKind kind) const;
  void send(int to, Bytes bytes);
  void receive();
  void deliver(int from, const Bytes& bytes);

  std::function<void(int)> heard_of_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  int tag_ = 0;
  int rank_ = 0;
  int size_ = 0;
  uint64_t generation_ = 0;
  std::list<Message> leaving_, coming_;  // oldest first; a list keeps the addresses of its elements
  std::map<int, Bytes> notices_;         // the newest notice, by rank
  std::map<uint64_t, Error> aborted_;    // by call number
};

}  // namespace tilestone::comm_internal
