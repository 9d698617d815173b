// tilestone delta: writes what has changed from one checkpoint to another.
#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string>

#include "tilestone/cli/commands.h"
#include "tilestone/cli/opened.h"
#include "tilestone/cli/output.h"
#include "tilestone/cli/run.h"
#include "tilestone/cli/stopping.h"

namespace tilestone::cli {
namespace {

nlohmann::ordered_json json_of(const DeltaReport& report) {
  return {{"base", report.base},
          {"result", report.result},
          {"unchanged", report.unchanged},
          {"changed", report.changed},
          {"added", report.added},
          {"removed", report.removed},
          {"objects_left_out", report.left_out},
          {"bytes", report.bytes},
          {"whole_bytes", report.whole_bytes},
          {"seconds", report.seconds}};
}

}  // namespace

int delta(const DeltaCommand& command) {
  DeltaOptions options;
  options.reading.follow_links = command.follow_links;
  options.progress = command.json ? nullptr : progress_line();
  DeltaReport report;
  end_in_order([&](std::shared_ptr<const Interrupt> interrupt) {
    options.interrupt = std::move(interrupt);
    report = make_delta(location_of(command.a, command.follow_links),
                        location_of(command.b, command.follow_links), command.path, options);
  });
  if (command.json) {
    print_json(json_of(report));
    return kOk;
  }
  fmt::print("{} changed, {} unchanged, {} added, {} removed\n", counted(report.changed, "tensor"),
             grouped(report.unchanged), grouped(report.added), grouped(report.removed));
  if (report.left_out > 0) {
    fmt::print("{} of B not in the delta, which has only tensors\n",
               counted(report.left_out, "object"));
  }
  const double share = report.whole_bytes == 0 ? 0
                                               : 100 * static_cast<double>(report.bytes) /
                                                     static_cast<double>(report.whole_bytes);
  fmt::print("{}: {}, {:.2f} % of {}, in {:.2f} s\n", printable(command.path),
             human_bytes(report.bytes), share, human_bytes(report.whole_bytes), report.seconds);
  return kOk;
}

}  // namespace tilestone::cli
