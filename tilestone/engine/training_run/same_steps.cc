#include "tilestone/engine/training_run/same_steps_internal.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/base/size_text.h"
#include "tilestone/engine/agree.h"

namespace tilestone::engine {
namespace {

constexpr double kFirstPause = 0.1;  // seconds until ranks look again, each time twice as long
constexpr int kLooks = 5;            // in all 1.5 s

// What a rank sees, which another program may be changing at the moment.
std::string seen_text(const std::vector<StepInfo>& steps) {
  if (steps.empty()) return "no step";
  if (steps.size() == 1) return steps[0].name;
  std::string names;
  for (const StepInfo& each : steps) names += each.name + '/';
  return fmt::format("{}, the last one {}, XXH3 of the names {:016x}",
                     counted(steps.size(), "step"), steps.back().name, xxh3_64(as_bytes(names)));
}

Error different_steps(const RunDirectory& run, const std::vector<Bytes>& said) {
  std::map<Bytes, std::vector<int>> ranks;
  for (size_t rank = 0; rank < said.size(); ++rank)
    ranks[said[rank]].push_back(static_cast<int>(rank));
  std::string who;
  for (const auto& [seen, with_it] : ranks) {
    who += fmt::format("{}{}: {}", who.empty() ? "" : "; ", ranks_text(with_it), as_text(seen));
  }
  const auto other =
      std::find_if(said.begin(), said.end(), [&](const Bytes& bytes) { return bytes != said[0]; });
  return Error(ErrorCode::kMismatch, fmt::format("the ranks see different steps in {} ({})",
                                                 run.location().describe(), who))
      .with_rank(static_cast<int>(other - said.begin()))
      .with_hint(
          "every rank needs the run's directory on the same file system: is it mounted on "
          "every host?");
}

}  // namespace

Bytes decided_by_rank_0(const Communicator& comm, const char* work, Deadline deadline,
                        const std::function<Bytes()>& decide) {
  return agree(
      comm, work, deadline, [](int, const Bytes&) { return Bytes(); },
      [&](int, const std::vector<Bytes>&) { return Decision{decide(), true}; });
}

Bytes decided_on_same_steps(const RunDirectory& directory, const Communicator& comm,
                            const char* work, Deadline deadline, const Terms& terms,
                            const std::function<Bytes()>& decide, Listing* listed) {
  const RunDirectory run = directory.until(deadline);
  const auto say = [&](int round, const Bytes&) {
    const double pause = round == 0 ? 0 : kFirstPause * (1 << (round - 1));
    std::this_thread::sleep_for(std::chrono::duration<double>(pause));
    return with_terms(to_bytes(seen_text(run.list(listed))), terms);
  };
  return agree(comm, work, deadline, say, [&](int round, std::vector<Bytes> said) {
    agree_on_terms(said);
    const bool same =
        std::all_of(said.begin(), said.end(), [&](const Bytes& seen) { return seen == said[0]; });
    if (!same && round + 1 == kLooks) throw different_steps(run, said);
    return Decision{same ? decide() : Bytes(), same};
  });
}

}  // namespace tilestone::engine
