#include "tilestone/engine/open/rank_local_internal.h"

#include <optional>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/open/attempt_files_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/run/terms_internal.h"

namespace tilestone::engine {
namespace {

// The heads of rank-local saves without a communicator that have begun here and were not abandoned.
std::vector<AttemptHead> rank_local_heads(Storage& storage, std::span<const std::string> names) {
  std::vector<AttemptHead> heads;
  for (const std::string& name : names) {
    const auto own = parse_in_own_directory(name);
    if (!own || name != attempt_name(own->save_id)) continue;
    auto head = read_head(storage, own->save_id);
    if (!head || !head->rank_local) continue;
    // An abandoned save that gc has not removed yet is not the one of the existing checkpoint.
    if (read_outcome(storage, own->save_id) == Outcome::kAbandoned) continue;
    heads.push_back(*std::move(head));
  }
  return heads;
}

}  // namespace

bool is_rank_local(const Format& format, std::span<const std::string> names) {
  const std::vector<std::string> rank_local = format.rank_local_files(names);
  return !rank_local.empty() && format.index_files(names).size() == rank_local.size();
}

void expect_all_ranks(Storage& storage, const Format& format, std::span<const std::string> names) {
  for (const AttemptHead& head : rank_local_heads(storage, names)) {
    std::vector<int> missing;
    for (int rank = 0; rank < head.world_size; ++rank) {
      if (!contains_name(names, format.rank_index_name(rank))) missing.push_back(rank);
    }
    if (missing.empty()) continue;
    const bool one = missing.size() == 1;
    throw Error(ErrorCode::kNotFound,
                "no complete checkpoint at " + storage.describe() + ": in the rank-local save " +
                    head.save_id + ", " + ranks_text(missing) + " of " +
                    std::to_string(head.world_size) + (one ? " has" : " have") + " no metadata")
        .with_file(format.rank_index_name(missing.front()))
        .with_rank(missing.front())
        .with_hint(std::string("`tilestone publish` completes the save if ") +
                   (one ? "this rank has" : "these ranks have") + " written; else " +
                   (one ? "it" : "they") +
                   " can save again under the same token, or `tilestone gc "
                   "--abandon` ends the save");
  }
}

void expect_no_other_ranks(Storage& storage, const Format& format,
                           std::span<const std::string> names, const Metadata& metadata) {
  const std::string& id = metadata.save_id;
  if (is_save_id(id) && read_outcome(storage, id) == Outcome::kAbandoned) {
    throw Error(ErrorCode::kNotFound, "no checkpoint at " + storage.describe() +
                                          ": the rank-local save " + id + " was abandoned")
        .with_file(format.rank_local_files(names).front())
        .with_hint("remove the metadata files of its ranks");
  }
  for (const std::string& name : names) {
    const auto data = format.parse_data_file_name(name);
    if (!data || contains_name(names, format.rank_index_name(data->rank))) continue;
    // Data files of other Tilestone saves may be leftovers.
    if (is_save_id(data->save_id) && data->save_id != id) continue;
    throw Error(ErrorCode::kCorrupt, "a rank-local checkpoint has a data file of rank " +
                                         std::to_string(data->rank) +
                                         " and no metadata of that rank")
        .with_file(name)
        .with_rank(data->rank)
        .with_hint(
            "the save of that rank failed or is under way; if the file is left from an older "
            "checkpoint, remove it");
  }
}

}  // namespace tilestone::engine
