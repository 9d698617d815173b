// What a listing of a run needs to know of its steps, in the names of small files: hints.cc.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/engine/training_run/checkpoint_manager.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

inline constexpr std::string_view kHints = ".tilestone/steps/";

struct Hints {
  std::map<std::string, StepInfo> steps;  // by folder; StepInfo::hint is the file's name
  std::vector<std::string> void_files;    // of these nothing is known: two hints of one folder
};
// By one listing. A file that is none of ours is passed over.
Hints read_hints(Storage& run);
// The files of the hints of a folder.
std::vector<std::string> hints_of(Storage& run, const std::string& folder);
// Fills the metrics, which may not fit into the name. False: they can't be read.
bool add_metrics(Storage& run, StepInfo& hinted);

// The name of the hint of a durable step; "": it gets none, because no run saved it, or the name
// would be too long.
std::string hint_name(const Storage& run, const StepInfo& step);
// Puts that file, which does not exist.
void put_hint(Storage& run, const StepInfo& step, const std::string& name);

}  // namespace tilestone::engine
