#include "tilestone/engine/write/fetching_internal.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"

namespace tilestone::engine {
namespace {

constexpr uint64_t kBatchBytes = 64u << 20;
constexpr size_t kBatchCopies = 1024;
constexpr size_t kBatchesAhead = 2;  // of run()

template <typename Body>
void named(const std::string& key, const Body& body) {
  try {
    body();
  } catch (...) {
    if (!key.empty()) throw current_error().with_key(key);
    throw;
  }
}

}  // namespace

void Fetching::add(const TensorView& from, std::byte* to, const std::string& key) {
  for (uint64_t begin = 0; begin < from.bytes(); begin += kBatchBytes) {
    const uint64_t size = std::min(kBatchBytes, from.bytes() - begin);
    added_.push_back({from.device, begin, {to + begin, size}});
    keys_.push_back(key);
  }
}

void Fetching::run(const Deadline& deadline) {
  while (!added_.empty()) {
    submit_first(deadline);
    if (running_.size() > kBatchesAhead) wait_for_first();
  }
  while (!running_.empty()) wait_for_first();
}

void Fetching::submit(const Deadline& deadline) {
  while (!added_.empty()) submit_first(deadline);
}

void Fetching::submit_ahead(const Deadline& deadline, const std::function<bool()>& delay_program) {
  if (added_.empty()) return;
  submit(deadline);
  if (delay_program()) return;
  while (!running_.empty()) wait_for_first();
}

void Fetching::submit_first(const Deadline& deadline) {
  std::vector<DeviceCopy> copies;
  uint64_t bytes = 0;
  while (!added_.empty() && copies.size() < kBatchCopies &&
         (copies.empty() || bytes + added_.front().host.size() <= kBatchBytes)) {
    bytes += added_.front().host.size();
    copies.push_back(std::move(added_.front()));
    added_.pop_front();
  }
  const std::string key = copies.size() == 1 ? keys_.front() : "";
  keys_.erase(keys_.begin(), keys_.begin() + static_cast<ptrdiff_t>(copies.size()));
  named(key, [&] {
    if (deadline.expired()) throw Error(ErrorCode::kTimeout, "the deadline passed while staging");
    running_.push_back({key, {CopyTo::kHost, copies}});
  });
}

void Fetching::wait_for_first() {
  Batch first = std::move(running_.front());
  running_.pop_front();
  named(first.key, [&] { first.copies.wait(); });
}

}  // namespace tilestone::engine
