// tilestone verify: checks that every byte is what its writer wrote.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>

#include "tilestone/cli/commands.h"
#include "tilestone/cli/opened.h"
#include "tilestone/cli/output.h"
#include "tilestone/cli/run.h"
#include "tilestone/cli/runs.h"
#include "tilestone/cli/stopping.h"

namespace tilestone::cli {
namespace {

constexpr size_t kLeastName = 12;  // columns of a name that is shortened

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
  out["notes"] = report.notes;
  out["damages"] = json_of(report.damages);
  out["truncated"] = nlohmann::ordered_json::array();
  for (const ShortFile& file : report.short_files) {
    out["truncated"].push_back({{"file", file.file},
                                {"size", file.size},
                                {"expected", file.expected},
                                {"keys", file.keys}});
  }
  if (mended != nullptr) out["mended"] = json_of(*mended);
  return out;
}

// One line for each file that lacks its end, of at most `width` columns as far as shortening the
// names allows; 0: any number. Returns the files.
std::set<std::string> print_truncated(const std::vector<ShortFile>& files, size_t width) {
  std::set<std::string> names;
  for (const ShortFile& file : files) {
    const std::string sizes =
        fmt::format("{} bytes of {}", grouped(file.size), grouped(file.expected));
    const std::string lacks =
        file.keys == 0 ? "" : fmt::format("; it lacks {}", counted(file.keys, "key"));
    std::string name = printable(file.file);
    std::string key = file.keys == 0 ? "" : file.keys == 1 ? ", " : ", first ";
    const size_t before = key.size();
    if (file.keys > 0) key += printable(file.first_key);
    if (width > 0) {
      const size_t rest = sizes.size() + lacks.size() + 13;  // "TRUNCATED" and spaces
      name = shortened(name, std::max(kLeastName, width - std::min(width, rest)));
      const size_t left = width - std::min(width, rest + width_of(name));
      key = left < before + kLeastName ? "" : shortened(key, left);
    }
    fmt::print("{}  {}  {}{}{}\n", coloured("TRUNCATED", Colour::kBad), name, sizes, lacks, key);
    names.insert(file.file);
  }
  return names;
}

void print_text(const VerifyReport& report, const VerifyOptions& options) {
  std::set<std::string> truncated;
  if (!options.all) {
    truncated = print_truncated(report.short_files, options.wide ? 0 : terminal_width());
  }
  for (const Damage& damage : report.damages) {
    const bool is_end = damage.beyond_end || (damage.key.empty() && !damage.unsafe);
    if (is_end && truncated.contains(damage.file)) continue;
    const std::string where = damage.file.empty()
                                  ? std::string("in no file")
                                  : fmt::format("{}  bytes {} to {}", printable(damage.file),
                                                damage.offset, damage.offset + damage.size);
    const std::string key =
        damage.key.empty() ? std::string() : fmt::format("key {}: ", printable(damage.key));
    fmt::print("{}  {}  {}{}{}{}\n", coloured(damage.unsafe ? "UNSAFE" : "DAMAGED", Colour::kBad),
               where, damage.copy ? "a copy of " : "", key, printable(damage.problem),
               damage.intact_in.empty()
                   ? ""
                   : fmt::format("; its elements are intact in {}", printable(damage.intact_in)));
  }
  const double rate = report.seconds > 0 ? static_cast<double>(report.bytes) / report.seconds : 0;
  fmt::print("{}: {} in {}, {} in {:.2f} s ({}/s)\n",
             report.ok() ? coloured("ok", Colour::kGood)
                         : coloured(fmt::format("{} damaged", grouped(report.damages.size())),
                                    Colour::kBad),
             counted(report.items, "item"), counted(report.files, "file"),
             human_bytes(report.bytes), report.seconds, human_bytes(static_cast<uint64_t>(rate)));
  print_notes(report.notes);
  if (!truncated.empty()) fmt::print("--all lists each item that truncated files lack\n");
  if (report.items_without_checksum > 0) {
    fmt::print("of {} only the structure was checked: the writer stored no checksum\n",
               counted(report.items_without_checksum, "item"));
  }
}

void print_mended(const Damage& damage) {
  const std::string what =
      damage.key.empty()
          ? printable(damage.problem)
          : fmt::format("key {}, from {}", printable(damage.key), printable(damage.intact_in));
  fmt::print("{}  {}  {}\n", coloured("MENDED", Colour::kGood), printable(damage.file), what);
}

// Each damaged file that several of the checkpoints need.
void print_shared(const VerifiedFiles& shared) {
  for (const std::vector<std::string>& names : shared.damaged()) {
    fmt::print("{} share a damaged file:\n", counted(names.size(), "checkpoint"));
    for (const std::string& name : names) fmt::print("  {}\n", printable(name));
  }
}

// Verifies one checkpoint, after a repair if that is wanted, and prints what is found unless it is
// wanted as JSON.
// `shared`: of the other checkpoints of the call.
Said verify_one(const Location& location, const VerifyOptions& options, VerifiedFiles* shared) {
  OpenOptions open;
  const ProgressFn progress = options.json ? nullptr : progress_line();
  RepairReport done;
  if (options.repair) {
    end_in_order([&](std::shared_ptr<const Interrupt> interrupt) {
      open.interrupt = std::move(interrupt);
      done = repair(location, open, progress);
    });
  } else {
    done.now = Checkpoint::open(location, open).verify(progress, shared);
  }
  if (!options.json) {
    for (const Damage& damage : done.mended) print_mended(damage);
    print_text(done.now, options);
  }
  const int code = done.now.any_unsafe() ? kUnsafe : done.now.ok() ? kOk : kDamaged;
  return {code, json_of(done.now, options.repair ? &done.mended : nullptr)};
}

}  // namespace

int verify(const VerifyOptions& options) {
  const bool one = options.at.is_one_checkpoint();
  VerifiedFiles shared;
  const auto verify_path = [&](const std::string& path) {
    return verify_one(location_of(path, options.at.follow_links), options, one ? nullptr : &shared);
  };
  const int code = for_each_path(options.at.all(), one, options.json, verify_path, " ");
  if (!options.json) print_shared(shared);
  return code;
}

}  // namespace tilestone::cli
