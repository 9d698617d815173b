#include "tilestone/engine/fast_tier/host_copies_internal.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/run/rounds_internal.h"

namespace tilestone::engine {
namespace {

constexpr uint64_t kTurn = 4u << 20;  // bytes
// For one turn of all hosts. The last one of a file makes it durable, which may take minutes.
constexpr std::chrono::seconds kTurnTime{600};

// What this host sends, file after file.
class Sending {
 public:
  Sending(std::shared_ptr<Storage> folder, const HeldStep& held)
      : folder_(std::move(folder)), held_(held) {}

  // Empty once everything was sent.
  Bytes next() {
    if (next_ == held_.here.size()) return {};
    const ReceiptFile& file = held_.about.files[held_.here[next_]];
    if (open_ == nullptr) open_ = folder_->open(file.name);
    Bytes bytes(std::min(kTurn, file.size - sent_));
    const ReadOp op{open_.get(), sent_, bytes.size(), bytes.data()};
    if (!bytes.empty()) folder_->read({&op, 1}, {}, [](size_t, ByteView) {});
    sent_ += bytes.size();
    ByteWriter out;
    out.varint(held_.here[next_]);
    out.blob(bytes);
    if (sent_ == file.size) {
      open_.reset();
      sent_ = 0;
      ++next_;
    }
    return std::move(out).take();
  }

 private:
  const std::shared_ptr<Storage> folder_;
  const HeldStep& held_;
  size_t next_ = 0;
  uint64_t sent_ = 0;
  std::unique_ptr<ReadableFile> open_;
};

// What one host gets from another.
class Receiving {
 public:
  Receiving(std::shared_ptr<Storage> folder, const HeldStep& held, size_t from)
      : folder_(std::move(folder)),
        held_(held),
        scratch_(".copy-" + std::to_string(from) + ".tmp") {}
  ~Receiving() {
    if (open_ == nullptr) return;
    open_.reset();
    try {
      folder_->remove(scratch_);
    } catch (const Error& error) {
      log(LogLevel::kDebug, error.what());
    }
  }

  void take(ByteView message, const Deadline& deadline) {
    ByteReader in(message, "a file of another host");
    const uint64_t index = in.varint();
    if (index >= held_.about.files.size()) in.fail("an unknown file");
    const ReceiptFile& file = held_.about.files[index];
    if (open_ == nullptr) {
      if (folder_->stat(scratch_)) folder_->remove(scratch_);
      open_ = folder_->create(scratch_, file.size, deadline);
    }
    open_->append(in.blob());
    if (open_->size() < file.size) return;
    open_->sync(deadline);
    open_->close();
    open_.reset();
    folder_->rename(scratch_, file.name, true);
    folder_->settle("");
  }

 private:
  const std::shared_ptr<Storage> folder_;
  const HeldStep& held_;
  const std::string scratch_;
  std::unique_ptr<WritableFile> open_;
};

}  // namespace

std::vector<int> copy_targets(const std::vector<int>& first_of,
                              const std::vector<std::string>& domains) {
  const auto domain_of = [&](int rank) {
    return domains.empty() ? std::to_string(rank) : domains[static_cast<size_t>(rank)];
  };
  if (!domains.empty() && domains.size() != first_of.size()) {
    throw Error(ErrorCode::kInvalidArgument, "domains of a fast tier has " +
                                                 std::to_string(domains.size()) +
                                                 " names; expected one for each of " +
                                                 std::to_string(first_of.size()) + " ranks");
  }
  std::vector<int> hosts = first_of;
  std::ranges::sort(hosts);
  hosts.erase(std::unique(hosts.begin(), hosts.end()), hosts.end());
  std::vector<int> targets(first_of.size(), -1);
  for (size_t i = 0; i < hosts.size(); ++i) {
    int& target = targets[static_cast<size_t>(hosts[i])];
    for (size_t ahead = 1; ahead < hosts.size() && target < 0; ++ahead) {
      const int other = hosts[(i + ahead) % hosts.size()];
      if (domain_of(other) != domain_of(hosts[i])) target = other;
    }
    if (target >= 0) continue;
    throw Error(
        ErrorCode::kInvalidArgument,
        "copies of a fast tier need another host, in another domain, than that of this rank")
        .with_rank(hosts[i])
        .with_hint("save with copies=0; ranks whose directory is the same are on one host");
  }
  return targets;
}

void copy_to_hosts(const Communicator& comm, const HostFolder& folder, const std::string& save_id,
                   const std::vector<int>& targets, const std::shared_ptr<Interrupt>& interrupt) {
  const int target = targets.at(static_cast<size_t>(comm.rank()));
  const auto turn_end = [&] { return Deadline::after(kTurnTime).with_interrupt(interrupt); };
  Rounds rounds(comm, "copies on other hosts", save_id, turn_end());
  std::optional<HeldStep> held;
  std::optional<Sending> sending;
  std::vector<std::unique_ptr<Receiving>> receiving(static_cast<size_t>(comm.size()));
  std::vector<Bytes> received;
  for (bool more = true; more;) {
    const Deadline deadline = turn_end();
    received = rounds.exchange("files of hosts", deadline, [&] {
      if (target >= 0 && !held) {
        held = folder.find(save_id);
        if (!held) throw Error(ErrorCode::kNotFound, "the step is on this host no more");
        sending.emplace(folder.at(held->folder), *held);
      }
      for (size_t from = 0; from < received.size(); ++from) {
        if (received[from].size() < 2) continue;
        auto& one = receiving[from];
        if (one == nullptr) {
          one = std::make_unique<Receiving>(folder.at(held->folder), *held, from);
        }
        one->take(ByteView(received[from]).subspan(1), deadline);
      }
      const Bytes mine = sending ? sending->next() : Bytes();
      std::vector<Bytes> messages(static_cast<size_t>(comm.size()),
                                  Bytes{std::byte(!mine.empty())});
      if (!mine.empty()) {
        Bytes& message = messages[static_cast<size_t>(target)];
        message.insert(message.end(), mine.begin(), mine.end());
      }
      return messages;
    });
    more = std::ranges::any_of(received, [](const Bytes& message) {
      return !message.empty() && message[0] != std::byte(0);
    });
  }
}

}  // namespace tilestone::engine
