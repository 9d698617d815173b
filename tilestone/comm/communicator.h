// Communicator: moves bytes between the ranks of a group.
//
// All ranks of the group make the same operations in the same order. Every operation takes a
// deadline. After it, the operation throws Error(kTimeout), which names the operation and, if this
// rank knows them, the missing ranks. If a rank is known to have ended, the operation throws
// Error(kRankFailed) with its number. After an error that all ranks saw, they may use the group
// again: messages of a failed operation are never mistaken for messages of a later one.
//
// Each rank counts its operations. Inside a Call (call.h) the numbers continue from a number that
// the ranks agree on when the call begins, so earlier differences between ranks do not matter.
// Outside of calls they continue from the last operation. A rank that skips or repeats an operation
// there is out of step with the others until the next Call.
//
// Only one thread of a rank at a time may use a group; calls of several threads run one after the
// other.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/deadline.h"

namespace tilestone {

class CallPort;

// The interface that each kind of communicator implements, with point-to-point messages or with its
// own collectives. The sizes of the messages may differ between ranks and may be 0. The
// implementation must also support messages of more than 2 GiB.
class CommunicatorImpl {
 public:
  virtual ~CommunicatorImpl() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string describe() const = 0;  // "threads", "mpi", "torch.distributed (gloo)"

  // On the coordinator, rank 0: the bytes of every rank, by rank. On other ranks: empty.
  virtual std::vector<Bytes> gather(ByteView mine, Deadline deadline) = 0;
  // `parts` is used on rank 0 only: parts[r] goes to rank r. Returns this rank's part.
  virtual Bytes scatter(std::vector<Bytes> parts, Deadline deadline) = 0;
  // `mine` is used on rank 0 only. Returns rank 0's bytes on every rank.
  virtual Bytes broadcast(ByteView mine, Deadline deadline) = 0;
  // to[r] goes to rank r; element [r] of the result came from rank r.
  virtual std::vector<Bytes> all_to_all(std::vector<Bytes> to, Deadline deadline) = 0;

  // Null: the ranks can't agree on calls, so a rank that skips an operation stays out of step.
  virtual CallPort* call_port() { return nullptr; }
};

// A cheap handle to a rank's end of a group. Copies share the end.
class Communicator {
 public:
  Communicator();  // solo: a group of one
  explicit Communicator(std::shared_ptr<CommunicatorImpl> impl) : impl_(std::move(impl)) {}

  int rank() const { return impl_->rank(); }
  int size() const { return impl_->size(); }
  std::string describe() const { return impl_->describe(); }
  bool is_coordinator() const { return rank() == 0; }

  std::vector<Bytes> gather(ByteView mine, Deadline deadline) const {
    return impl_->gather(mine, deadline);
  }
  Bytes scatter(std::vector<Bytes> parts, Deadline deadline) const {
    return impl_->scatter(std::move(parts), deadline);
  }
  Bytes broadcast(ByteView mine, Deadline deadline) const {
    return impl_->broadcast(mine, deadline);
  }
  std::vector<Bytes> all_to_all(std::vector<Bytes> to, Deadline deadline) const {
    return impl_->all_to_all(std::move(to), deadline);
  }
  CallPort* call_port() const { return impl_->call_port(); }

 private:
  std::shared_ptr<CommunicatorImpl> impl_;
};

// A group of one rank.
Communicator solo();

// Communicators over MPI. In a build without MPI these functions throw Error(kUnsupported).
//
// All ranks of the communicator that is duplicated must make the same call. After the deadline it
// throws Error(kTimeout). (MPI_Init, which is called if MPI is not initialised yet, waits for all
// ranks of the job without a deadline.) MPI must allow calls from the threads that use the result.
// With MPI_THREAD_MULTIPLE any thread may call MPI; with less, a warning is logged once.
//
// MPI does not report that a process has died. A rank that has died leads to Error(kTimeout) that
// names it, or to Error(kRankFailed) if MPI reports an error. By default mpirun kills the whole job
// when one process dies. With `mpirun --enable-recovery` the others continue and get the error.

// A duplicate of MPI_COMM_WORLD. If MPI is not initialised, initialises it (MPI_THREAD_MULTIPLE)
// and finalises it at exit. It does not finalise MPI if a rank was missing in an operation and has
// sent nothing since, because MPI_Finalize would wait for that rank forever. mpirun reports this as
// an improper exit.
Communicator mpi_world(Deadline deadline = Deadline::never());

// A duplicate of any MPI communicator. `handle` points to an MPI_Comm (opaque, so that this header
// does not need mpi.h). The MPI_Comm may be freed after the call.
Communicator mpi_communicator(const void* handle, Deadline deadline = Deadline::never());

}  // namespace tilestone
