#include "tilestone/engine/commit/presence_internal.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/base/thread_pool.h"
#include "tilestone/engine/commit/pause_internal.h"
#include "tilestone/engine/run/resources_internal.h"

namespace tilestone::engine {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr Seconds kLongestSearch{30};  // for files that are not to be seen yet
constexpr double kShareOfTime = 0.5;   // likewise, of the time to the deadline
constexpr Seconds kFirstPause{0.02};   // between two looks; each is twice the one before
constexpr Seconds kLongestPause{2};

struct Expected {
  const ReportedFile* file = nullptr;
  int rank = 0;
  std::optional<uint64_t> found;  // bytes, where it is there with another size
};

// Opening, not stat: a network file system then asks its server.
std::optional<uint64_t> size_of(Storage& storage, const std::string& name) {
  try {
    return storage.open(name)->size();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kNotFound || error.sys_errno() == ESTALE) return std::nullopt;
    throw;
  }
}

// Those that are not there as they were reported, in their order.
std::vector<Expected> missing_of(Storage& storage, std::vector<Expected> expected,
                                 ThreadPool* threads, Deadline deadline) {
  std::vector<char> missing(expected.size(), 0);
  const auto look = [&](size_t i) {
    if (deadline.expired()) {
      throw Error(ErrorCode::kTimeout, "the deadline passed while the ranks' files were looked for")
          .with_file(expected[i].file->name);
    }
    expected[i].found = size_of(storage, expected[i].file->name);
    missing[i] = expected[i].found == expected[i].file->size ? 0 : 1;
  };
  if (threads != nullptr) {
    threads->parallel_for(expected.size(), look);
  } else {
    for (size_t i = 0; i < expected.size(); ++i) look(i);
  }
  std::vector<Expected> left;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (missing[i] != 0) left.push_back(expected[i]);
  }
  return left;
}

[[noreturn]] void fail_missing(const Storage& storage, const std::vector<Expected>& missing) {
  const Expected& first = missing.front();
  std::string what = "rank " + std::to_string(first.rank) + " wrote a file of " +
                     std::to_string(first.file->size) + " bytes";
  if (first.found) {
    what += " that has " + std::to_string(*first.found) + " bytes in " + storage.describe() +
            " as the rank that publishes the save sees it";
  } else {
    what += " that the rank that publishes the save does not find in " + storage.describe();
  }
  if (missing.size() > 1) {
    what += " (the same is true of " + std::to_string(missing.size() - 1) + " more files)";
  }
  throw Error(ErrorCode::kMismatch, what)
      .with_file(first.file->name)
      .with_rank(first.rank)
      .with_hint("the directory of rank " + std::to_string(first.rank) +
                 " seems to be another one: all ranks need one file system at this path");
}

}  // namespace

void expect_files(Storage& storage, std::span<const RankReport> reports, int threads,
                  Deadline deadline) {
  std::vector<Expected> missing;
  for (const RankReport& report : reports) {
    for (const ReportedFile& file : report.files) missing.push_back({&file, report.rank, {}});
  }
  // One file of each rank, as usual for a small group, is not worth threads.
  constexpr size_t kWorthThreads = 16;
  std::optional<ThreadPool> pool;
  if (missing.size() >= kWorthThreads) pool.emplace(thread_count(threads));
  const Deadline patience =
      Deadline::after(std::min(kShareOfTime * Seconds(deadline.remaining()), kLongestSearch));
  for (Seconds wait = kFirstPause;; wait = std::min(2 * wait, kLongestPause)) {
    missing = missing_of(storage, std::move(missing), pool ? &*pool : nullptr, deadline);
    if (missing.empty()) return;
    if (patience.expired()) fail_missing(storage, missing);
    pause(std::min(wait, Seconds(patience.remaining())), deadline);
  }
}

}  // namespace tilestone::engine
