// tilestone verify: is every byte what its writer wrote?
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "tilestone/cli/commands.h"
#include "tilestone/cli/opened.h"
#include "tilestone/cli/output.h"
#include "tilestone/cli/run.h"

namespace tilestone::cli {
namespace {

void print_json(const VerifyReport& report) {
  nlohmann::ordered_json out = {{"ok", report.ok()},
                                {"files", report.files},
                                {"items", report.items},
                                {"bytes", report.bytes},
                                {"items_without_checksum", report.items_without_checksum},
                                {"seconds", report.seconds}};
  out["damages"] = nlohmann::ordered_json::array();
  for (const Damage& damage : report.damages) {
    out["damages"].push_back({{"file", damage.file},
                              {"offset", damage.offset},
                              {"size", damage.size},
                              {"key", damage.key},
                              {"problem", damage.problem},
                              {"unsafe", damage.unsafe}});
  }
  fmt::print("{}\n", out.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
}

void print_text(const VerifyReport& report) {
  for (const Damage& damage : report.damages) {
    const std::string place = damage.file.empty()
                                  ? std::string("in no file")
                                  : fmt::format("{}  bytes {} to {}", printable(damage.file),
                                                damage.offset, damage.offset + damage.size);
    fmt::print("{}  {}  {}{}\n", damage.unsafe ? "UNSAFE" : "DAMAGED", place,
               damage.key.empty() ? "" : fmt::format("key {}: ", printable(damage.key)),
               printable(damage.problem));
  }
  const double rate = report.seconds > 0 ? static_cast<double>(report.bytes) / report.seconds : 0;
  fmt::print("{}: {} in {}, {} in {:.2f} s ({}/s)\n",
             report.ok() ? "ok" : fmt::format("{} damaged", grouped(report.damages.size())),
             counted(report.items, "item"), counted(report.files, "file"),
             human_bytes(report.bytes), report.seconds, human_bytes(static_cast<uint64_t>(rate)));
  if (report.items_without_checksum > 0) {
    fmt::print(
        "{} items carry no checksum from their writer: their structure was checked, their "
        "content could not be\n",
        grouped(report.items_without_checksum));
  }
}

}  // namespace

int verify(const VerifyOptions& options) {
  OpenOptions open;
  open.threads = options.threads;
  const Checkpoint checkpoint =
      Checkpoint::open(location_of(options.path, options.follow_links), open);
  const VerifyReport report = checkpoint.verify(options.json ? nullptr : progress_line());
  if (options.json) {
    print_json(report);
  } else {
    print_text(report);
  }
  if (report.any_unsafe()) return kUnsafe;
  return report.ok() ? kOk : kDamaged;
}

}  // namespace tilestone::cli
