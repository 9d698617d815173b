// Paths of the command line that are runs' directories, and several paths at once.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "tilestone/cli/run.h"
#include "tilestone/tilestone.h"

namespace tilestone::cli {

// Where the steps of a run are found, from the command's options.
struct Targets {
  std::vector<std::string> paths;
  bool follow_links = false;
  std::string name = kStepPattern;  // of steps' folders

  bool is_run(const std::string& path) const;
  RunDirectory run(const std::string& path) const;
  // Whether there is one path, which is not a run's directory.
  bool is_one_checkpoint() const;
  // The paths of the checkpoints: of a run, those of all its steps.
  std::vector<std::string> all() const;
};

// Whether the step's folder has a checkpoint, intact or not.
bool is_checkpoint(const StepInfo& step);
// The line from which a run continues, of its durable steps; empty if there is none.
Line followed_line(std::span<const StepInfo> steps);

// What a command says of one path.
struct Said {
  int code = kOk;
  nlohmann::ordered_json json = nullptr;
};
// Calls `work` for each path and, if `json`, prints what it returns. Unless there is only one path
// and `one` is true, it names each path first, followed by `after_name`, and a failure is printed
// with the path and does not end the others. Returns the worst exit code: unsafe content before
// damage, before other failures.
int for_each_path(const std::vector<std::string>& paths, bool one, bool json,
                  const std::function<Said(const std::string& path)>& work,
                  const char* after_name = "\n");

}  // namespace tilestone::cli
