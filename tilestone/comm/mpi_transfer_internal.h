// One message between two MPI ranks, sent or received without blocking.
//
// A message is sent as a header (operation number, payload size) followed by the payload in
// fragments, all with the same tag. MPI keeps the order of messages with one tag between two ranks,
// so the messages of an operation arrive in the order in which they were sent.
#pragma once

#include <mpi.h>

#include <memory>
#include <vector>

#include "tilestone/base/bytes.h"

namespace tilestone::comm_internal {

struct MpiHeader {
  uint64_t operation = 0;
  uint64_t size = 0;  // of the payload, bytes
};

// The address of a message: communicator, peer, tag and operation number.
struct MpiRoute {
  const char* operation_name = "";  // a string literal
  MPI_Comm comm = MPI_COMM_NULL;
  int peer = 0;
  int tag = 0;
  uint64_t operation = 0;
  size_t fragment_bytes = 0;
};

// MPI accesses the object's memory until the transfer is complete. Until then the object must not
// be moved or destroyed.
class MpiTransfer {
 public:
  explicit MpiTransfer(const MpiRoute& route) : route_(route) {}
  virtual ~MpiTransfer() = default;
  MpiTransfer(const MpiTransfer&) = delete;
  MpiTransfer& operator=(const MpiTransfer&) = delete;

  int peer() const { return route_.peer; }

  virtual void start() = 0;     // call once
  virtual bool complete() = 0;  // makes progress; true when all bytes are sent or received
  virtual bool receives() const = 0;

 protected:
  // Throws Error(kRankFailed), which names the peer, if `code` is an MPI error.
  void check(int code, const char* what) const;
  bool requests_complete(const char* what);

  MpiRoute route_;
  MpiHeader header_;
  std::vector<MPI_Request> requests_;
};

class MpiSend final : public MpiTransfer {
 public:
  MpiSend(const MpiRoute& route, std::shared_ptr<const Bytes> payload);
  void start() override;
  bool complete() override;
  bool receives() const override { return false; }

 private:
  std::shared_ptr<const Bytes> payload_;
};

class MpiReceive final : public MpiTransfer {
 public:
  explicit MpiReceive(const MpiRoute& route) : MpiTransfer(route) {}
  void start() override;
  bool complete() override;
  bool receives() const override { return true; }
  Bytes take() { return std::move(payload_); }

 private:
  void start_payload();

  Bytes payload_;
  bool header_came_ = false;
};

}  // namespace tilestone::comm_internal
