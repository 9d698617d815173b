// The driver of a save to a fast tier: the ranks plan by rounds, each writes to a directory of its
// own host, and they meet once more in the background.
//
//  1. In the call: planned and staged as any save in the background. There is no transaction.
//  2. Each rank writes its data files at HostStep::storage() and makes them durable.
//  3. The ranks meet in rounds of a communicator that nothing else uses (HostStep::meet()). Rank 0
//     merges the receipts and makes the index, as a commit does.
//  4. The first rank of each host puts the index beside its host's files (HostStep::keep()), the
//     file last that says that the step is there.
//  5. If all have, the step is whole: on each host lies a checkpoint whose other files the other
//     hosts have.
//
// A crash before 4 leaves folders that say nothing, and one during 4 a step that no host can show
// as whole: the hosts' files are compared with those that the index names, so a step counts only if
// every file is there.
//
// If a host's disk is full, every rank hears of it in 3 or 4. Then the ranks save what they have
// staged straight to the location, in rounds of the same communicator. If any rank has written
// something in the call, which nobody has any more, all of them fail instead.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "tilestone/base/error.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/engine/run/rounds_internal.h"
#include "tilestone/engine/save/by_rounds_internal.h"
#include "tilestone/engine/save/in_background_internal.h"
#include "tilestone/engine/save/kept_step_internal.h"
#include "tilestone/engine/save/request_internal.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// Where one save's files go on this rank's host, and how its ranks meet. Every rank has one.
class HostStep {
 public:
  HostStep(uint64_t step, bool drains) : step_(step), drains_(drains) {}
  virtual ~HostStep() = default;
  HostStep(const HostStep&) = delete;
  HostStep& operator=(const HostStep&) = delete;

  uint64_t step() const { return step_; }
  bool drains() const { return drains_; }
  // Whether the ranks have planned the save. Before, what a save throws is not of its hosts.
  bool has_begun() const { return has_begun_; }
  void begin() { has_begun_ = true; }
  // Where this rank writes; the same directory for all ranks of a host.
  virtual std::shared_ptr<Storage> storage(const std::string& save_id) = 0;
  // Runs `work` in the thread that owns the communicator; returns or throws as `work` does.
  virtual void meet(const std::function<void(const Communicator&)>& work) = 0;
  virtual bool is_first_of_host(int rank) const = 0;
  // On the first rank of each host: makes the index durable beside the host's files.
  virtual void keep(const KeptIndex& index, Deadline deadline) = 0;
  // Then on every rank, within meet(): the step is whole; or nobody will keep it.
  virtual void kept(const std::string& save_id) = 0;
  virtual void dropped(const std::string& save_id) noexcept = 0;
  // Instead of kept(): the location has the step, because a host's disk is full, as `why` says.
  virtual void saved_straight(const Error& why) = 0;
  // On this rank the save has failed; `full`: because a host's disk is full.
  virtual void failed(const Error& error, bool full) noexcept = 0;

 private:
  const uint64_t step_;
  const bool drains_;
  bool has_begun_ = false;
};

// Whether the error says that a disk is full.
bool is_disk_full(const Error& error);

// Null: the request is none for a fast tier.
std::shared_ptr<HostStep> hosts_of(const MadeRequest& request);
// Once the ranks have planned.
void save_on(const std::shared_ptr<HostStep>& hosts, PlannedShare& planned);

// One rank's save after the call. Its function is called by the save's thread.
class OnHosts {
 public:
  // `deadline`: with the interrupt that abandons the save.
  OnHosts(StagedShare staged, std::shared_ptr<SessionParts> session, Deadline deadline);
  SaveResult save();

 private:
  Written write();
  void meet(const Communicator& comm, Written written);
  void keep(Rounds& rounds, const std::variant<Bytes, Error>& index);
  Bytes describe(std::vector<Bytes> payloads);
  void save_straight(const Communicator& comm);
  void release();

  PlannedShare planned_;
  std::shared_ptr<StagingMemory> memory_;
  std::optional<Receipt> before_;
  const bool is_whole_;  // see StagedShare
  std::shared_ptr<SessionParts> session_;
  const Deadline deadline_;
  Inventory now_;  // on rank 0, what the save holds
};

}  // namespace tilestone::engine
