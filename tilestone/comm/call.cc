#include "tilestone/comm/call.h"

#include <chrono>
#include <random>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/comm/call_port.h"
#include "tilestone/comm/rendezvous_internal.h"

namespace tilestone {

using comm_internal::Hello;

CallMemory::CallMemory() = default;
CallMemory::~CallMemory() = default;

namespace {

uint64_t random_nonce() {
  std::random_device source;
  return (uint64_t{source()} << 32) ^ source();
}

Hello make_hello(CallPort& port, const std::string& work, const std::string& location) {
  Hello hello;
  hello.nonce = random_nonce();
  hello.last_operation = port.last_operation();
  hello.work = work;
  hello.location = location;
  return hello;
}

}  // namespace

Call::Call(Communicator comm, std::string work, std::string location, Deadline deadline)
    : comm_(std::move(comm)), port_(comm_.size() > 1 ? comm_.call_port() : nullptr) {
  if (port_ == nullptr) return;
  take_turn(deadline);
  try {
    const Hello hello = make_hello(*port_, work, location);
    const uint64_t number =
        comm_.is_coordinator()
            ? comm_internal::arrive_as_coordinator(*port_, comm_.size(), hello, deadline)
            : comm_internal::arrive_as_member(*port_, comm_.rank(), hello, deadline);
    if (!comm_.is_coordinator()) port_->enter(number);
  } catch (...) {
    end_turn();
    throw;
  }
}

Call::~Call() {
  if (port_ == nullptr) return;
  try {
    port_->leave();
  } catch (...) {
    log(LogLevel::kWarning,
        std::string("could not end a save or load properly: ") + current_error().what());
  }
  end_turn();
}

void Call::abort(const Error& why) noexcept {
  if (port_ == nullptr) return;
  Error error = why;
  comm_internal::abort_call(*port_, error.with_rank(comm_.rank()));
}

void Call::announce_last() {
  if (port_ != nullptr) port_->announce_last();
}

void Call::take_turn(Deadline deadline) {
  CallMemory& memory = port_->memory();
  std::unique_lock lock(memory.mutex);
  while (memory.caller) {
    if (memory.caller == std::this_thread::get_id()) {
      throw Error(ErrorCode::kInvalidArgument,
                  "this thread is already in a save or load on the same group");
    }
    if (deadline.expired()) {
      throw Error(ErrorCode::kTimeout,
                  "the deadline passed while another thread used the same group");
    }
    memory.freed.wait_for(lock, deadline.wait_time());
  }
  memory.caller = std::this_thread::get_id();
}

void Call::end_turn() {
  CallMemory& memory = port_->memory();
  const std::lock_guard lock(memory.mutex);
  memory.caller.reset();
  memory.freed.notify_one();
}

}  // namespace tilestone
