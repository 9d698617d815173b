#include "tilestone/engine/fast_tier/host_copies_internal.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <map>
#include <optional>
#include <ranges>
#include <set>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/fast_tier/copying_internal.h"
#include "tilestone/engine/fast_tier/host_reads_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"

namespace tilestone::engine {
namespace {

const std::string kCopyScratch = ".copy.tmp";

// The step before that this host has; null: none.
std::shared_ptr<const Location> step_before(const HostFolder& folder, const std::string& save_id) {
  std::shared_ptr<const Location> found;
  for (const HeldStep& held : folder.list()) {
    if (held.about.save_id == save_id) break;
    found = std::make_shared<const Location>(folder.at(held.folder));
  }
  return found;
}

// The files of a step that this host is to keep and lacks, and of each a rank whose host has it.
std::map<std::string, int> lacking(const SaidStep& step, const std::vector<Receipt>& receipts,
                                   int host, const std::vector<int>& first_of,
                                   const std::vector<int>& targets) {
  std::map<std::string, int> owners;
  if (receipts.size() != first_of.size()) return owners;  // of another layout
  size_t index = 0;                                       // of the step's files
  for (const Receipt& receipt : receipts) {
    const auto rank = static_cast<size_t>(receipt.rank);
    const bool keeps = targets.at(rank) == host || first_of.at(rank) == host;
    for (const ReceiptFile& file : receipt.files) {
      const std::vector<int>& found = step.holders.at(index++);
      const bool is_here = std::ranges::find(found, host) != found.end();
      if (keeps && !is_here && !found.empty()) owners.emplace(file.name, found.front());
    }
  }
  return owners;
}

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
  for (size_t rank = 0; rank < first_of.size(); ++rank) {
    targets[rank] = targets[static_cast<size_t>(first_of[rank])];
  }
  return targets;
}

void copy_from_hosts(const Communicator& comm, const HostFolder& folder, uint64_t step,
                     const std::string& save_id, const std::vector<int>& first_of,
                     const std::vector<int>& targets, std::chrono::duration<double> patience,
                     const std::shared_ptr<Interrupt>& interrupt) {
  const auto own = folder.at(HostFolder::folder_of(step, save_id));
  const int host = comm.rank();
  const bool is_first = first_of.at(static_cast<size_t>(host)) == host;
  const auto limit = [&] { return Deadline::after(patience).with_interrupt(interrupt); };
  const auto say = [&] {
    const auto held = is_first ? folder.find(save_id) : std::nullopt;
    return held ? say_steps({&*held, 1}, host) : Bytes();
  };
  const auto any = [](const SaidStep&) { return true; };
  const auto said = agree_on_step(comm, "copies of a step", limit(), say, any);
  if (!said) return;
  HostReads reads(reading_of(own));
  const auto copy = [&] {
    if (!is_first) return;
    const Deadline deadline = Deadline::never().with_interrupt(interrupt);
    const Manifest manifest = folder.manifest(folder.get(save_id));
    const auto owners = lacking(*said, manifest.receipts, host, first_of, targets);
    const auto named = std::views::keys(owners);
    const std::set<std::string> names(named.begin(), named.end());
    const auto from = [&](const std::string& file, uint64_t offset, MutableByteView target) {
      const FarRange range{owners.at(file), file, offset, target.size(), target.data()};
      reads.get({&range, 1}, deadline);
    };
    StepCopy work{
        .from = from, .to = own, .earlier = step_before(folder, save_id), .scratch = kCopyScratch};
    work.run(manifest.receipts, names, deadline);
  };
  auto copying = std::async(std::launch::async, [&] {
    try {
      copy();
    } catch (...) {
      reads.end();
      remove_files(*own, {&kCopyScratch, 1});
      throw;
    }
    reads.end();
  });
  reads.serve(comm, save_id, limit);
  copying.get();
}

}  // namespace tilestone::engine
