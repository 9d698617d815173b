// Communicator: moves bytes between the ranks of a group, nothing else.
//
// Every rank of the group makes the same operations in the same order. Every operation takes a
// deadline; past it, it throws Error(kTimeout) that names the operation and, where this rank can
// know it, who is missing. A rank that is known to be gone gives Error(kRankFailed) with its
// number. After an error the group may be used again by ranks that all saw it; messages of an
// operation that failed are never mistaken for those of a later one.
//
// Each rank counts its operations. Inside a Call (call.h) they are numbered on from a number that
// the ranks agree on at its beginning, so whatever a rank did before makes no difference.
// Operations outside of calls are numbered on from the last one: ranks that skip or repeat one
// there are out of step with the others until the next Call.
//
// A rank uses a group from one thread at a time; calls of several threads follow one another.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/deadline.h"

namespace tilestone {

class CallPort;

// What an engine of ranks implements: point-to-point bytes would be enough for all of these, so
// an implementation is free to use its own collectives. Sizes differ by rank, 0 included; messages
// of more than 2 GiB are the implementation's business.
class CommunicatorImpl {
 public:
  virtual ~CommunicatorImpl() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string describe() const = 0;  // "threads", "mpi", "torch.distributed (gloo)"

  // At root: every rank's bytes, by rank. Elsewhere: empty.
  virtual std::vector<Bytes> gather(ByteView mine, int root, Deadline deadline) = 0;
  // `parts` counts at root only: parts[r] goes to rank r.
  virtual Bytes scatter(std::vector<Bytes> parts, int root, Deadline deadline) = 0;
  virtual Bytes broadcast(ByteView mine, int root, Deadline deadline) = 0;
  // to[r] goes to rank r; the result's [r] came from rank r.
  virtual std::vector<Bytes> all_to_all(std::vector<Bytes> to, Deadline deadline) = 0;

  // Null: ranks can't agree on calls, and stay apart once one has skipped an operation.
  virtual CallPort* call_port() { return nullptr; }
};

// A cheap handle on a rank's end of a group; copies share it.
class Communicator {
 public:
  Communicator();  // solo: a group of one
  explicit Communicator(std::shared_ptr<CommunicatorImpl> impl) : impl_(std::move(impl)) {}

  int rank() const { return impl_->rank(); }
  int size() const { return impl_->size(); }
  std::string describe() const { return impl_->describe(); }
  bool is_coordinator() const { return rank() == 0; }

  std::vector<Bytes> gather(ByteView mine, int root, Deadline deadline) const {
    return impl_->gather(mine, root, deadline);
  }
  Bytes scatter(std::vector<Bytes> parts, int root, Deadline deadline) const {
    return impl_->scatter(std::move(parts), root, deadline);
  }
  Bytes broadcast(ByteView mine, int root, Deadline deadline) const {
    return impl_->broadcast(mine, root, deadline);
  }
  std::vector<Bytes> all_to_all(std::vector<Bytes> to, Deadline deadline) const {
    return impl_->all_to_all(std::move(to), deadline);
  }
  std::vector<Bytes> all_gather(ByteView mine, Deadline deadline) const;
  void barrier(Deadline deadline) const;
  CallPort* call_port() const { return impl_->call_port(); }

 private:
  std::shared_ptr<CommunicatorImpl> impl_;
};

}  // namespace tilestone
