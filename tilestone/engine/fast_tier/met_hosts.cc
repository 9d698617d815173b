#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/host.h"
#include "tilestone/base/pause.h"
#include "tilestone/base/uuid.h"
#include "tilestone/engine/agree.h"
#include "tilestone/engine/fast_tier/met_hosts_internal.h"
#include "tilestone/engine/training_run/checkpoint_manager.h"

namespace tilestone::engine {
namespace {

const std::string kLock = ".lock";
constexpr std::chrono::seconds kOldProcess{10};  // until one that was killed has released the lock
constexpr std::chrono::duration<double> kPause{0.05};

std::string file_of(std::string_view id) { return fmt::format(".rank-{}", id); }

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

// One rank's part of the meeting.
class Meeting {
 public:
  Meeting(const Communicator& comm, const HostFolder& folder, const std::function<void()>& check,
          const Deadline& deadline)
      : folder_(folder),
        root_(*folder.root()),
        check_(check),
        rank_(comm.rank()),
        deadline_(deadline) {}
  ~Meeting() {
    try {
      root_.remove(file_of(own_));
    } catch (const Error& error) {
      log(LogLevel::kDebug, error.what());
    }
  }

  Bytes say(int round, const Bytes& answer) {
    if (round == 0) return leave();
    if (round == 1) return look(answer);
    return take(answer);
  }

  static Decision decide(int round, const std::vector<Bytes>& said) {
    ByteWriter out;
    if (round == 0) {
      for (const Bytes& id : said) out.blob(id);
      return {std::move(out).take(), false};
    }
    uint64_t highest = 0;
    for (const Bytes& one : said) {
      ByteReader in(one, "what a rank says of its host");
      const uint64_t number = in.varint();
      if (round == 1) out.varint(number);
      highest = std::max(highest, number);
    }
    if (round == 2) out.varint(highest);
    return {std::move(out).take(), round == 2};
  }

  MetHosts take_hosts(const Bytes& answer) {
    ByteReader in(answer, "the steps of the hosts");
    hosts_.ordinal = in.varint();
    return std::move(hosts_);
  }

 private:
  Bytes leave() {
    check_();
    try {
      root_.put(file_of(own_), {}, Condition::always(), file_of(own_) + ".tmp", deadline_);
    } catch (const Error& error) {
      throw error.with_message("the fast tier " + root_.describe() +
                               " can't be used: " + error.message());
    }
    return to_bytes(own_);
  }

  // The lowest rank whose file is here.
  Bytes look(const Bytes& ids) {
    ByteReader in(ids, "the files of ranks");
    uint64_t first = 0;
    while (in.remaining() > 0 && !root_.stat(file_of(as_text(in.blob())))) ++first;
    ByteWriter out;
    out.varint(std::min(first, static_cast<uint64_t>(rank_)));
    return std::move(out).take();
  }

  Bytes take(const Bytes& firsts) {
    ByteReader in(firsts, "the first ranks of hosts");
    while (in.remaining() > 0) hosts_.first_of.push_back(static_cast<int>(in.varint()));
    uint64_t highest = 0;
    if (hosts_.is_first(rank_)) {
      hosts_.claim = claim(root_, deadline_);
      folder_.remove_leftovers();
      for (const HeldStep& held : folder_.list()) {
        highest = std::max(highest, lineage_of(held.about.attributes).ordinal);
      }
    }
    ByteWriter out;
    out.varint(highest);
    return std::move(out).take();
  }

  const HostFolder& folder_;
  Storage& root_;
  const std::function<void()>& check_;
  const int rank_;
  const Deadline deadline_;
  const std::string own_ = random_uuid();
  MetHosts hosts_;
};

}  // namespace

MetHosts meet_hosts(const Communicator& comm, const HostFolder& folder,
                    const std::function<void()>& check, const Deadline& deadline) {
  Meeting meeting(comm, folder, check, deadline);
  const Bytes answer = agree(
      comm, "meeting at a fast tier", deadline,
      [&](int round, const Bytes& before) { return meeting.say(round, before); }, Meeting::decide);
  return meeting.take_hosts(answer);
}

}  // namespace tilestone::engine
