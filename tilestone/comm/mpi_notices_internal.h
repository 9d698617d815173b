// Notices between MPI ranks, and the errors with which ranks end a call: short messages of one tag
// of their own, sent and received without blocking.
#pragma once

#include <mpi.h>

#include <functional>
#include <list>
#include <map>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/comm/call_port.h"

namespace tilestone::comm_internal {

class MpiNotices {
 public:
  // `heard_of` is called with the rank of each message that comes.
  MpiNotices(std::function<void(int)> heard_of) : heard_of_(std::move(heard_of)) {}
  MpiNotices(const MpiNotices&) = delete;
  MpiNotices& operator=(const MpiNotices&) = delete;

  void open(MPI_Comm comm, int tag, int rank, int size);

  void post(std::vector<Notice> notices);
  // Of each rank the newest one, and only once.
  std::vector<Notice> take();
  void abort(uint64_t call, const Error& why);
  // Throws the error with which a rank has ended the call.
  void check(uint64_t call) const;

  // Sends and receives what can be.
  void progress();
  // Whether MPI may still touch the memory of a message.
  bool is_busy() const { return !leaving_.empty() || !coming_.empty(); }
  // Gives that memory up to MPI for as long as the process lives.
  void release();

 private:
  struct Message {
    int peer = 0;
    Bytes bytes;
    MPI_Request request = MPI_REQUEST_NULL;
  };
  void send(int to, Bytes bytes);
  void receive();
  void deliver(int from, const Bytes& bytes);

  std::function<void(int)> heard_of_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  int tag_ = 0;
  int rank_ = 0;
  int size_ = 0;
  std::list<Message> leaving_, coming_;  // in order; their addresses stay
  std::map<int, Bytes> notices_;         // newest, by rank
  std::map<uint64_t, Error> aborted_;    // by the calls' numbers
};

}  // namespace tilestone::comm_internal
