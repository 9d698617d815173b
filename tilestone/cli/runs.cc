#include "tilestone/cli/runs.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <iterator>

#include "tilestone/cli/opened.h"
#include "tilestone/cli/output.h"

namespace tilestone::cli {
namespace {

// Of two exit codes, the one that counts.
int worse(int a, int b) {
  static constexpr int kOrder[] = {kOk, kUsage, kIoFailed, kDamaged, kUnsafe};
  const auto position = [](int code) {
    return std::find(std::begin(kOrder), std::end(kOrder), code);
  };
  return position(a) < position(b) ? b : a;
}

}  // namespace

RunDirectory Targets::run(const std::string& path) const {
  return RunDirectory(location_of(path, follow_links), name);
}

bool Targets::is_run(const std::string& path) const { return is_run_directory(run(path)); }

bool Targets::is_one_checkpoint() const { return paths.size() == 1 && !is_run(paths.front()); }

std::vector<std::string> Targets::all() const {
  std::vector<std::string> found;
  for (const std::string& path : paths) {
    if (!is_run(path)) {
      found.push_back(path);
      continue;
    }
    for (const StepInfo& step : run(path).list()) {
      found.push_back(path + (path.ends_with('/') ? "" : "/") + step.name);
    }
  }
  return found;
}

bool is_checkpoint(const StepInfo& step) {
  return step.state == StepState::kDurable || step.state == StepState::kDamaged;
}

Line followed_line(std::span<const StepInfo> steps) {
  const StepInfo* tip = nullptr;
  std::vector<StepInfo> durable(steps.begin(), steps.end());
  std::erase_if(durable, [](const StepInfo& each) { return each.state != StepState::kDurable; });
  if (const StepInfo* newest = tip_of(durable)) {
    for (const StepInfo& each : steps) {
      if (each.name == newest->name) tip = &each;
    }
  }
  return tip == nullptr ? Line() : line_of(steps, *tip);
}

int for_each_path(const std::vector<std::string>& paths, bool one, bool json,
                  const std::function<Said(const std::string& path)>& work,
                  const char* after_name) {
  if (one) {
    const Said said = work(paths.front());
    if (json) print_json(said.json);
    return said.code;
  }
  int worst = kOk;
  auto all = nlohmann::ordered_json::array();
  for (const std::string& path : paths) {
    try {
      if (!json) fmt::print("{}:{}", printable(path), after_name);
      std::fflush(stdout);
      Said said = work(path);
      said.json["path"] = path;
      all.push_back(std::move(said.json));
      worst = worse(worst, said.code);
    } catch (const Error& error) {
      std::fflush(stdout);
      fmt::print(stderr, "{}: {}\n", printable(path), error.what());
      worst = worse(worst, exit_code(error.code()));
    }
  }
  if (json) print_json(all);
  return worst;
}

}  // namespace tilestone::cli
