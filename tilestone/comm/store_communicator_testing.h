// The conformance suite of places where ranks leave messages, and such places for tests. It checks
// with GoogleTest's EXPECT_*.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>

#include "tilestone/comm/store_communicator.h"

namespace tilestone::comm_testing {

// A map that several processes (threads) share.
struct MessageMap {
  std::mutex mutex;
  std::map<std::string, Bytes> messages;
};
std::shared_ptr<MessageStore> store_over(std::shared_ptr<MessageMap> map);

// A place whose requests go wrong in a random order: a request fails before or after it was done;
// fails, and is done before a later request of this process; or is done twice, and the second
// answer counts.
std::shared_ptr<MessageStore> unsteady(std::shared_ptr<MessageStore> store, uint64_t seed);

// Makes one process's view of one place; each call of check_… begins with an empty one.
using ViewOf = std::function<std::shared_ptr<MessageStore>(int process)>;

// What MessageStore promises.
void check_messages(const ViewOf& view);
// Gathers and verdicts of threads: with one group, with groups, and with ranks that are restarted
// before and after they have left their message.
void check_meeting(const std::function<ViewOf()>& new_place);

}  // namespace tilestone::comm_testing
