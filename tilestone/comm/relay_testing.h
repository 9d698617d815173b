// A communicator that passes all operations on to another one. Tests override those that they watch
// or let fail.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tilestone/comm/communicator.h"

namespace tilestone {

class RelayComm : public CommunicatorImpl {
 public:
  explicit RelayComm(Communicator comm) : comm_(std::move(comm)) {}
  int rank() const override { return comm_.rank(); }
  int size() const override { return comm_.size(); }
  std::string describe() const override { return comm_.describe(); }
  std::vector<Bytes> gather(ByteView mine, Deadline deadline) override {
    return comm_.gather(mine, deadline);
  }
  Bytes scatter(std::vector<Bytes> parts, Deadline deadline) override {
    return comm_.scatter(std::move(parts), deadline);
  }
  Bytes broadcast(ByteView mine, Deadline deadline) override {
    return comm_.broadcast(mine, deadline);
  }
  std::vector<Bytes> all_to_all(std::vector<Bytes> to, Deadline deadline) override {
    return comm_.all_to_all(std::move(to), deadline);
  }
  CallPort* call_port() override { return comm_.call_port(); }

 protected:
  const Communicator comm_;
};

}  // namespace tilestone
