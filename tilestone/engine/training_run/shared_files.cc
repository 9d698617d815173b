#include "tilestone/engine/training_run/shared_files_internal.h"

#include <algorithm>
#include <optional>

#include "tilestone/base/error.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/format/data_file_name.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {
namespace {

std::optional<FileIdentity> identity_of(Storage& storage, const std::string& name) {
  const auto info = storage.stat(name);
  return info ? info->identity : std::nullopt;
}

bool has_manifest(const Location& location) {
  try {
    const std::vector<std::string> names =
        location.storage().list_files(std::string(kTilestoneDirectory) + "/");
    return std::ranges::any_of(
        names, [](const std::string& name) { return kind_of(name) == kManifestKind; });
  } catch (const Error& error) {
    log(LogLevel::kDebug, std::string("looking for a step to reuse: ") + error.what());
    return false;
  }
}

}  // namespace

std::shared_ptr<const Location> step_to_reuse(const RunDirectory& run,
                                              std::vector<std::string>& folders) {
  if (folders.empty()) return nullptr;
  const auto found = std::ranges::find_if(
      folders, [&](const std::string& folder) { return has_manifest(run.at(folder)); });
  if (found != folders.end()) folders.erase(folders.begin(), found);
  return std::make_shared<const Location>(run.at(folders[0]));
}

std::vector<std::string> steps_that_share(const RunDirectory& run, const std::string& folder,
                                          const std::string& file) {
  std::vector<std::string> found;
  try {
    const auto written = parse_data_file_name(file);
    if (!written) return found;
    const auto wanted = identity_of(run.at(folder).storage(), file);
    if (!wanted) return found;
    for (const StepInfo& step : run.list()) {
      if (step.name == folder) continue;
      const Location at = run.at(step.name);
      const std::vector<std::string> names = at.storage().list_files("");
      const bool shares = std::ranges::any_of(names, [&](const std::string& name) {
        const auto parts = parse_data_file_name(name);
        return parts && parts->rank == written->rank && identity_of(at.storage(), name) == wanted;
      });
      if (shares) found.push_back(step.name);
    }
  } catch (const Error& error) {
    log(LogLevel::kDebug, std::string("looking for steps that share a file: ") + error.what());
  }
  return found;
}

}  // namespace tilestone::engine
