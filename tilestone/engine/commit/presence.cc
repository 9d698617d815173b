#include "tilestone/engine/commit/presence_internal.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/base/pause.h"
#include "tilestone/base/thread_pool.h"
#include "tilestone/engine/run/resources_internal.h"

namespace tilestone::engine {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr Seconds kLongestSearch{30};  // for files that are not visible yet
constexpr double kShareOfTime = 0.5;   // of the time to the deadline, likewise
constexpr Seconds kFirstPause{0.02};   // between two looks; doubles each time
constexpr Seconds kLongestPause{2};

struct Expected {
  const ReceiptFile* file = nullptr;
  int rank = 0;
  std::optional<uint64_t> found;  // size in bytes as found; nullopt if the file is missing
};

using Sizes = std::unordered_map<std::string, uint64_t>;

// By one listing. nullopt: look at each file.
std::optional<Sizes> listed_sizes(Storage& storage) {
  if (!storage.facts().costs_requests) return std::nullopt;
  const Listing all = storage.listing("", Depth::kTree);
  if (all.infos.size() != all.files.size()) return std::nullopt;
  Sizes sizes;
  for (size_t i = 0; i < all.files.size(); ++i) sizes.emplace(all.files[i], all.infos[i].size);
  return sizes;
}

// Opens the file instead of calling stat, so that a network file system asks its server. Where each
// call is a request, opening would read it.
std::optional<uint64_t> size_of(Storage& storage, const std::string& name) {
  if (storage.facts().costs_requests) {
    const auto info = storage.stat(name);
    return info ? std::optional(info->size) : std::nullopt;
  }
  try {
    return storage.open(name)->size();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kNotFound || error.sys_errno() == ESTALE) return std::nullopt;
    throw;
  }
}

// The files that are missing or have another size than reported, in their order.
std::vector<Expected> missing_of(Storage& storage, std::vector<Expected> expected,
                                 ThreadPool* threads, Deadline deadline) {
  std::vector<char> missing(expected.size(), 0);
  const auto sizes = expected.size() > 1 ? listed_sizes(storage) : std::nullopt;
  const auto find = [&](const std::string& name) {
    if (!sizes) return size_of(storage, name);
    const auto found = sizes->find(name);
    return found == sizes->end() ? std::nullopt : std::optional(found->second);
  };
  const auto look = [&](size_t i) {
    if (deadline.expired()) {
      throw Error(ErrorCode::kTimeout, "the deadline passed while looking for the ranks' files")
          .with_file(expected[i].file->name);
    }
    expected[i].found = find(expected[i].file->name);
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
    what += ", but the rank that publishes the save finds " + std::to_string(*first.found) +
            " bytes in " + storage.describe();
  } else {
    what += ", but the rank that publishes the save does not find it in " + storage.describe();
  }
  if (missing.size() > 1) {
    what += " (likewise " + std::to_string(missing.size() - 1) + " more files)";
  }
  throw Error(ErrorCode::kMismatch, what)
      .with_file(first.file->name)
      .with_rank(first.rank)
      .with_hint(
          "rank " + std::to_string(first.rank) +
          " seems to write to another directory (all ranks need the same file system at this "
          "path), or the file was changed after it was written");
}

}  // namespace

void expect_files(Storage& storage, std::span<const Receipt> receipts, int threads,
                  Deadline deadline) {
  std::vector<Expected> missing;
  for (const Receipt& receipt : receipts) {
    for (const ReceiptFile& file : receipt.files) missing.push_back({&file, receipt.rank, {}});
  }
  // For a small group with one file per rank, threads cost more than they save.
  constexpr size_t kWorthThreads = 16;
  std::optional<ThreadPool> pool;
  if (missing.size() >= kWorthThreads) pool.emplace(files_at_once(thread_count(threads)));
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
