// tilestone verify: checks that every byte is what its writer wrote.
#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "tilestone/cli/commands.h"
#include "tilestone/cli/opened.h"
#include "tilestone/cli/output.h"
#include "tilestone/cli/run.h"
#include "tilestone/cli/runs.h"
#include "tilestone/cli/stopping.h"

namespace tilestone::cli {
namespace {

nlohmann::ordered_json json_of(const std::vector<Damage>& damages) {
  auto out = nlohmann::ordered_json::array();
  for (const Damage& damage : damages) {
    out.push_back({{"file", damage.file},
                   {"offset", damage.offset},
                   {"size", damage.size},
                   {"key", damage.key},
                   {"problem", damage.problem},
                   {"unsafe", damage.unsafe},
                   {"copy", damage.copy},
                   {"intact_in", damage.intact_in}});
  }
  return out;
}

nlohmann::ordered_json json_of(const VerifyReport& report, const std::vector<Damage>* mended) {
  nlohmann::ordered_json out = {{"ok", report.ok()},
                                {"files", report.files},
                                {"items", report.items},
                                {"bytes", report.bytes},
                                {"items_without_checksum", report.items_without_checksum},
                                {"seconds", report.seconds}};
  out["damages"] = json_of(report.damages);
  if (mended != nullptr) out["mended"] = json_of(*mended);
  return out;
}

void print_text(const VerifyReport& report) {
  for (const Damage& damage : report.damages) {
    const std::string place = damage.file.empty()
                                  ? std::string("in no file")
                                  : fmt::format("{}  bytes {} to {}", printable(damage.file),
                                                damage.offset, damage.offset + damage.size);
    const std::string key =
        damage.key.empty() ? std::string() : fmt::format("key {}: ", printable(damage.key));
    fmt::print("{}  {}  {}{}{}{}\n", damage.unsafe ? "UNSAFE" : "DAMAGED", place,
               damage.copy ? "a copy of " : "", key, printable(damage.problem),
               damage.intact_in.empty()
                   ? ""
                   : fmt::format("; its elements are intact in {}", printable(damage.intact_in)));
  }
  const double rate = report.seconds > 0 ? static_cast<double>(report.bytes) / report.seconds : 0;
  fmt::print("{}: {} in {}, {} in {:.2f} s ({}/s)\n",
             report.ok() ? "ok" : fmt::format("{} damaged", grouped(report.damages.size())),
             counted(report.items, "item"), counted(report.files, "file"),
             human_bytes(report.bytes), report.seconds, human_bytes(static_cast<uint64_t>(rate)));
  if (report.items_without_checksum > 0) {
    fmt::print(
        "{} without a checksum from the writer: the structure was checked, the content could not "
        "be\n",
        counted(report.items_without_checksum, "item"));
  }
}

void print_mended(const Damage& damage) {
  const std::string what =
      damage.key.empty()
          ? printable(damage.problem)
          : fmt::format("key {}, from {}", printable(damage.key), printable(damage.intact_in));
  fmt::print("MENDED  {}  {}\n", printable(damage.file), what);
}

struct Verified {
  int code = kOk;
  nlohmann::ordered_json json;
};

// Verifies one checkpoint, after a repair if that is wanted, and prints what is found unless it is
// wanted as JSON.
Verified verify_one(const Location& location, const VerifyOptions& options) {
  OpenOptions open;
  open.resources.threads = options.threads;
  const ProgressFn progress = options.json ? nullptr : progress_line();
  RepairReport done;
  if (options.repair) {
    end_in_order([&](std::shared_ptr<const Interrupt> interrupt) {
      open.interrupt = std::move(interrupt);
      done = repair(location, open, progress);
    });
  } else {
    done.now = Checkpoint::open(location, open).verify(progress);
  }
  if (!options.json) {
    for (const Damage& damage : done.mended) print_mended(damage);
    print_text(done.now);
  }
  const int code = done.now.any_unsafe() ? kUnsafe : done.now.ok() ? kOk : kDamaged;
  return {code, json_of(done.now, options.repair ? &done.mended : nullptr)};
}

void print(const nlohmann::ordered_json& out) {
  fmt::print("{}\n", out.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
}

}  // namespace

int verify(const VerifyOptions& options) {
  if (options.at.is_one_checkpoint()) {
    const Verified found =
        verify_one(location_of(options.at.paths.front(), options.at.follow_links), options);
    if (options.json) print(found.json);
    return found.code;
  }
  auto all = nlohmann::ordered_json::array();
  const int code = for_each_path(options.at.all(), [&](const std::string& path) {
    if (!options.json) {
      fmt::print("{}: ", printable(path));
      std::fflush(stdout);
    }
    Verified found = verify_one(location_of(path, options.at.follow_links), options);
    found.json["path"] = path;
    all.push_back(std::move(found.json));
    return found.code;
  });
  if (options.json) print(all);
  return code;
}

}  // namespace tilestone::cli
