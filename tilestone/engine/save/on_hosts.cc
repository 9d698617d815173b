#include "tilestone/engine/save/on_hosts_internal.h"

#include <cerrno>
#include <set>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/commit/describe_internal.h"
#include "tilestone/version.h"

namespace tilestone::engine {

bool is_disk_full(const Error& error) {
  return error.sys_errno() == ENOSPC || error.sys_errno() == EDQUOT;
}

std::shared_ptr<HostStep> hosts_of(const MadeRequest& request) {
  const auto* const made = std::get_if<RequestView>(&request);
  if (made == nullptr || made->options->step == nullptr) return nullptr;
  return made->options->step->hosts;
}

void save_on(const std::shared_ptr<HostStep>& hosts, PlannedShare& planned) {
  planned.storage = hosts->storage(planned.share.save_id);
  planned.hosts = hosts;
  hosts->begin();
}

OnHosts::OnHosts(StagedShare staged, std::shared_ptr<SessionParts> session, Deadline deadline)
    : planned_(std::move(staged.planned)),
      memory_(std::move(staged.memory)),
      before_(std::move(staged.written)),
      is_whole_(staged.is_whole),
      session_(std::move(session)),
      deadline_(std::move(deadline)) {}

SaveResult OnHosts::save() {
  bool full = false;
  try {
    Written written = write();
    planned_.hosts->meet([&](const Communicator& comm) {
      try {
        meet(comm, std::move(written));
      } catch (const Error& error) {
        full = is_disk_full(error) && !is_whole_;
        if (full || !is_disk_full(error)) throw;
        save_straight(comm);
        planned_.hosts->saved_straight(error);
      }
    });
  } catch (...) {
    const Error error = current_error();
    if (planned_.lazy != nullptr) planned_.lazy->end(std::make_exception_ptr(error));
    release();
    planned_.hosts->failed(error, full);
    throw error;
  }
  return planned_.result;
}

// The ranks meet also if this one has failed.
Written OnHosts::write() {
  try {
    return write_staged(planned_, before_, session_.get(), deadline_);
  } catch (...) {
    return current_error();
  }
}

void OnHosts::meet(const Communicator& comm, Written written) {
  HostStep& hosts = *planned_.hosts;
  const SaveShare& share = planned_.share;
  const auto began = StepTimes::Clock::now();
  Rounds rounds(comm, "save to the hosts", share.save_id, deadline_);
  auto reported = began;
  try {
    Bytes made;
    rounds.run(
        "writing",
        [&](Deadline) {
          if (const Error* const failed = std::get_if<Error>(&written)) throw *failed;
          return std::get<Receipt>(written).encode();
        },
        [&](std::vector<Bytes> payloads) {
          made = describe(std::move(payloads));
          return std::vector<Bytes>();
        });
    const auto index =
        rounds.result_or_error([&] { return rounds.broadcast(made, rounds.deadline()); });
    made = {};
    planned_.steps.add("reporting", began);
    reported = StepTimes::Clock::now();
    keep(rounds, index);
  } catch (...) {
    if (Rounds::reached_all(current_error())) hosts.dropped(share.save_id);
    throw;
  }
  if (share.options.step != nullptr && comm.is_coordinator()) {
    share.options.step->now = std::move(now_);
    share.options.step->save_id = share.save_id;
  }
  hosts.kept(share.save_id);
  release();
  note_published(planned_, reported, planned_.result);
}

// The last round: what rank 0 has made is put beside the files of each host.
void OnHosts::keep(Rounds& rounds, const std::variant<Bytes, Error>& index) {
  rounds.run_last(
      "keeping the step on its hosts",
      [&](Deadline deadline) {
        if (const Error* const failed = std::get_if<Error>(&index)) throw *failed;
        if (planned_.hosts->is_first_of_host(rounds.comm().rank())) {
          planned_.hosts->keep(KeptIndex::decode(std::get<Bytes>(index)), deadline);
        }
        return Bytes();
      },
      [](const std::vector<Bytes>&) { return std::vector<Bytes>(); });
}

// The rest of an ordinary save by rounds, with what is planned and staged.
void OnHosts::save_straight(const Communicator& comm) {
  SavingByRounds saving(comm, "save past the full fast tier", planned_.share.save_id, deadline_);
  saving.planned = std::exchange(planned_, {});
  PlannedShare& planned = saving.planned;
  planned_.hosts = std::exchange(planned.hosts, nullptr);
  planned.storage = nullptr;
  planned.written.clear();
  planned.result.bytes_written = 0;
  const SaveShare& share = planned.share;
  share.options.step->reuse = nullptr;  // it is on the host
  try {
    const Bytes staging = saving.rounds.run(
        "beginning", [](Deadline) { return Bytes(); },
        [&](const std::vector<Bytes>& ranks) {
          const SaveOptions& options = share.options;
          planned.transaction.emplace(planned.location, share.format, share.dialect, share.save_id,
                                      options.overwrite || options.step->replaces,
                                      options.separation_hint);
          planned.transaction->begin(saving.rounds.deadline());
          return std::vector<Bytes>(ranks.size(), to_bytes(planned.transaction->sibling()));
        });
    planned.sibling = as_text(staging);
  } catch (...) {
    discard(planned, true);
    throw;
  }
  const auto began = StepTimes::Clock::now();
  write_step(saving, session_ != nullptr ? &session_->resources : nullptr);
  report_step(saving);
  SaveResult result = publish_step(saving);
  release_tensors(planned.share);
  release();
  note_published(planned, began, result);
  planned_.result = std::move(result);
}

// On rank 0: what the hosts keep.
Bytes OnHosts::describe(std::vector<Bytes> payloads) {
  const SaveShare& share = planned_.share;
  std::vector<Receipt> receipts;
  KeptIndex kept;
  for (const Bytes& payload : payloads) {
    receipts.push_back(Receipt::decode(payload));
    const auto& files = receipts.back().files;
    kept.about.files.insert(kept.about.files.end(), files.begin(), files.end());
  }
  ReplicaNames replicas = planned_.replicas;  // needed again if a host's disk is full
  SaveToIndex save = save_to_index(planned_, std::move(receipts), payloads);
  planned_.replicas = std::move(replicas);
  save.save_id = share.save_id;
  save.writer = writer_name();
  save.inventory = true;
  std::set<std::string> dialects;
  for (const IndexFile& file : save.of_dialect) dialects.insert(file.name);
  kept.about.step = planned_.hosts->step();
  kept.about.drains = planned_.hosts->drains();
  kept.about.replaces = share.options.overwrite || share.options.step->replaces;
  kept.about.save_id = share.save_id;
  kept.about.attributes = save.attributes;
  NewIndex made = describe_save(std::move(save), *share.format, *share.dialect);
  compare_with_before(*share.options.step, made.inventory);
  now_ = std::move(made.inventory);
  for (IndexFile& file : made.index) {
    kept.about.index.push_back(
        {file.name, file.role, dialects.contains(file.name), file.bytes.size()});
    kept.files.push_back(std::move(file.bytes));
  }
  kept.about.manifest_size = made.manifest.size();
  kept.manifest = std::move(made.manifest);
  return kept.encode();
}

// The next save may use the memory.
void OnHosts::release() {
  release_tensors(planned_.share);
  memory_.reset();
  session_.reset();
}

}  // namespace tilestone::engine
