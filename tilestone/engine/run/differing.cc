#include <algorithm>
#include <iterator>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/size_text.h"
#include "tilestone/engine/run/differing_internal.h"
#include "tilestone/engine/run/terms_internal.h"

namespace tilestone::engine {
namespace {

constexpr size_t kMaxInError = 10;     // keys
constexpr size_t kMaxWarnings = 50;    // of one save
constexpr size_t kMaxNamedRanks = 16;  // of one key

constexpr const char* kNotSameHint =
    "give values that differ between ranks a different key on each rank, or wrap them in a "
    "ShardedObject with its own cell";
constexpr const char* kContestedHint =
    "if the ranks hold different parts of one tensor (expert weights under expert parallelism), "
    "wrap "
    "them with ShardedTensor.from_param (docs/placements.md); otherwise give them different keys";

// "\"seed\" (ranks 0 and 2 differ)"
std::string described(const DifferingContent& one) {
  std::vector<int> ranks = {one.saved};
  ranks.insert(ranks.end(), one.others.begin(), one.others.end());
  std::sort(ranks.begin(), ranks.end());
  return "\"" + one.key + "\" (" + ranks_text(ranks, kMaxNamedRanks) + " differ)";
}

std::string keys_text(const std::vector<DifferingContent>& differing) {
  std::string keys;
  for (size_t i = 0; i < std::min(differing.size(), kMaxInError); ++i) {
    keys += (i == 0 ? "" : ", ") + described(differing[i]);
  }
  if (differing.size() > kMaxInError) {
    keys += " and " + std::to_string(differing.size() - kMaxInError) + " more";
  }
  return keys;
}

[[noreturn]] void refuse(const std::string& what, const std::vector<DifferingContent>& differing,
                         const char* hint) {
  throw Error(ErrorCode::kMismatch, what + ": " + keys_text(differing))
      .with_key(differing.front().key)
      .with_rank(differing.front().others.front())
      .with_hint(hint);
}

}  // namespace

void tell_of_differing(const std::vector<DifferingContent>& differing,
                       Checks::Differing common_differs, std::string_view dialect) {
  if (differing.empty() || common_differs == Checks::Differing::kIgnore) return;
  std::vector<DifferingContent> contested;
  std::copy_if(differing.begin(), differing.end(), std::back_inserter(contested),
               [](const DifferingContent& one) { return one.contested; });
  if (!contested.empty()) {
    refuse(
        "tensors of ranks that are not declared to hold the same have one key and place, but "
        "different elements, so all but one of them would be lost",
        contested, kContestedHint);
  }
  if (common_differs == Checks::Differing::kError) {
    refuse("values or objects are not the same on all ranks", differing, kNotSameHint);
  }
  for (size_t i = 0; i < std::min(differing.size(), kMaxWarnings); ++i) {
    log_once(LogLevel::kWarning,
             "values or objects are not the same on all ranks: " + described(differing[i]) +
                 ", and that of rank " + std::to_string(differing[i].saved) +
                 " is saved (dialect " + std::string(dialect) + "); " + kNotSameHint);
  }
  if (differing.size() > kMaxWarnings) {
    log_once(LogLevel::kWarning, std::to_string(differing.size() - kMaxWarnings) +
                                     " more values are not the same on all ranks");
  }
}

std::vector<std::vector<std::string>> lost_of(const std::vector<DifferingContent>& differing,
                                              size_t ranks) {
  std::vector<std::vector<std::string>> lost(ranks);
  for (const DifferingContent& one : differing) {
    for (const int rank : one.others) {
      std::vector<std::string>& keys = lost.at(static_cast<size_t>(rank));
      if (keys.size() < kMaxWarnings) keys.push_back(one.key);
    }
  }
  return lost;
}

void tell_of_lost(int rank, const std::vector<std::string>& keys) {
  if (rank == 0) return;
  for (const std::string& key : keys) {
    log_once(LogLevel::kWarning, "\"" + key + "\" of rank " + std::to_string(rank) +
                                     " differs from that of the rank whose value is saved");
  }
}

}  // namespace tilestone::engine
