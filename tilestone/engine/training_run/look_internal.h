// What the folder of a run's step holds.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tilestone/base/both_ways.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/training_run/checkpoint_manager.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// In a run's directory, before the run's id: it has steps on hosts.
inline constexpr const char* kFastMarker = ".fast-tier-of-";

struct Look {
  StepInfo info;
  std::optional<Error> error = std::nullopt;  // why the step is damaged
  bool lost_manifest = false;                 // so its line is not known
  bool is_empty = false;                      // no file is there
};
// Fills everything but the step, the name and whether it is a link. Throws only what prevents
// listing the folder.
Look look_at(const std::shared_ptr<Storage>& storage, StepInfo listed);

// Whether the step's manifest is there, all files together have the size that they had, and nobody
// saves there. By one listing.
bool has_files_of(Storage& storage, const StepInfo& known);

// By its hint, if it has one that can be believed.
Look look_or_believe(const RunDirectory& run, const StepInfo& listed);

// Looks at the steps that a run may continue from, in the order in which they count, until `take`
// returns true: the line with the highest ordinal, the newest step first. A step that is no
// checkpoint does not count. After a damaged one, also one of `damaged`, names at which nobody
// looks, only those follow that it continues.
using LookAt = std::function<Look(const StepInfo&)>;
void follow(const RunDirectory& run, std::vector<StepInfo> steps,
            const std::vector<std::string>& damaged, const LookAt& look,
            const std::function<bool(const Look&)>& take);

// Fills the save id and the lineage from the heads of the manifests there, and opens no checkpoint.
// Of several manifests, as a killed save leaves them, the one with the highest ordinal counts. If
// one can't be read, `state` is kDamaged and `problem` says why.
void read_lineage(Storage& storage, StepInfo& info);

// In messages, as in base/both_ways.h.
inline void walk_lineage(ByteWriter& out, const Lineage& lineage) {
  const auto attributes = to_attributes(lineage);
  both::text_map(out, attributes);
}
inline void walk_lineage(ByteReader& in, Lineage& lineage) {
  std::map<std::string, std::string> attributes;
  both::text_map(in, attributes);
  lineage = lineage_of(attributes);
}

// Whether a load failed because of what is there, and not of what was asked for: a key that an
// intact checkpoint lacks.
bool is_about_files(const Error& error);

// Whether there is something that may be a checkpoint: one that exists or is damaged. Opens none.
bool may_be_checkpoint(Storage& storage);
// The same, where these files are directly there.
bool may_be_checkpoint(Storage& storage, std::span<const std::string> files);

}  // namespace tilestone::engine
