#include "tilestone/comm/communicator.h"

#include "tilestone/comm/operation_internal.h"

namespace tilestone {
namespace {

class Solo final : public CommunicatorImpl {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::string describe() const override { return "solo"; }

  std::vector<Bytes> gather(ByteView mine, Deadline) override {
    return {Bytes(mine.begin(), mine.end())};
  }
  Bytes scatter(std::vector<Bytes> parts, Deadline) override {
    comm_internal::check_parts("scatter", parts.size(), 1);
    return std::move(parts.front());
  }
  Bytes broadcast(ByteView mine, Deadline) override { return Bytes(mine.begin(), mine.end()); }
  std::vector<Bytes> all_to_all(std::vector<Bytes> to, Deadline) override {
    comm_internal::check_parts("all_to_all", to.size(), 1);
    return to;
  }
};

}  // namespace

Communicator::Communicator() : Communicator(solo()) {}

Communicator solo() { return Communicator(std::make_shared<Solo>()); }

}  // namespace tilestone
