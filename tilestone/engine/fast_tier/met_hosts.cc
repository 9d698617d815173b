#include "tilestone/engine/fast_tier/met_hosts_internal.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/host.h"
#include "tilestone/base/or_log.h"
#include "tilestone/base/pause.h"
#include "tilestone/base/uuid.h"
#include "tilestone/engine/agree.h"
#include "tilestone/engine/training_run/checkpoint_manager.h"

namespace tilestone::engine {
namespace {

const std::string kLock = ".lock", kRank = ".rank-";
constexpr std::chrono::seconds kOldProcess{10};  // until one that was killed has released the lock
constexpr std::chrono::duration<double> kPause{0.05};

std::unique_ptr<StorageClaim> claim(Storage& root, const Deadline& deadline) {
  for (const Deadline patience = Deadline::after(kOldProcess);; pause(kPause, deadline)) {
    auto found = root.claim(kLock);
    if (found != nullptr) return found;
    if (!patience.expired() && !deadline.expired()) continue;
    throw Error(ErrorCode::kAlreadyExists, "another process or manager uses the fast tier " +
                                               root.describe() + " on " + host_name())
        .with_hint("close that manager, or give each run a directory of its own");
  }
}

void leave(Storage& root, const std::string& file, const Deadline& deadline) try {
  root.put(file, {}, Condition::always(), file + ".tmp", deadline);
} catch (const Error& error) {
  throw error.with_message("the fast tier " + root.describe() +
                           " can't be used: " + error.message());
}

// Round 0: the ids of all ranks. 1: of each, the first rank of its host, and the highest ordinal.
Decision decide(int round, const std::vector<Bytes>& said) {
  ByteWriter out;
  for (const Bytes& one : said) out.raw(one);
  return {std::move(out).take(), round == 1};
}

// The lowest rank whose file is here. `ids`: of all ranks, in their order.
int first_here(Storage& root, int rank, const Bytes& ids, size_t size) {
  ByteReader in(ids, "what ranks say of their hosts");
  int first = 0;
  while (first < rank && !root.stat(kRank + std::string(as_text(in.raw(size))))) ++first;
  return first;
}

}  // namespace

MetHosts meet_hosts(const Communicator& comm, const HostFolder& folder,
                    const std::function<void()>& check, const Deadline& deadline) {
  Storage& root = *folder.root();
  const std::string own = random_uuid();
  MetHosts hosts;
  const auto say = [&](int round, const Bytes& answer) {
    if (round == 0) {
      check();
      leave(root, kRank + own, deadline);
      return to_bytes(own);
    }
    const int first = first_here(root, comm.rank(), answer, own.size());
    if (first == comm.rank()) {
      hosts.claim = claim(root, deadline);
      folder.remove_leftovers();
      for (const HeldStep& held : folder.list()) {
        hosts.ordinal = std::max(hosts.ordinal, lineage_of(held.about.attributes).ordinal);
      }
    }
    ByteWriter out;
    out.varint(static_cast<uint64_t>(first));
    out.varint(hosts.ordinal);
    return std::move(out).take();
  };
  const auto remove = [&] {
    or_log(LogLevel::kDebug, "meeting at a fast tier", [&] { root.remove(kRank + own); });
  };
  try {
    const Bytes answer = agree(comm, "meeting at a fast tier", deadline, say, decide);
    ByteReader in(answer, "the hosts");
    while (in.remaining() > 0) {
      hosts.first_of.push_back(static_cast<int>(in.varint()));
      hosts.ordinal = std::max(hosts.ordinal, in.varint());
    }
  } catch (...) {
    remove();
    throw;
  }
  remove();
  return hosts;
}

}  // namespace tilestone::engine
