// tilestone diff: compares two checkpoints, of any formats and layouts.
#include <fmt/format.h>

#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "tilestone/cli/commands.h"
#include "tilestone/cli/opened.h"
#include "tilestone/cli/output.h"
#include "tilestone/cli/run.h"
#include "tilestone/cli/stopping.h"

namespace tilestone::cli {
namespace {

using Json = nlohmann::ordered_json;

Json number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

void print_json(const DiffReport& report) {
  Json out = {{"same", report.same()},
              {"equal_tensors", report.equal_tensors},
              {"equal_objects", report.equal_objects},
              {"bytes", report.bytes},
              {"seconds", report.seconds}};
  out["differences"] = Json::array();
  for (const Difference& found : report.differences) {
    Json entry = {{"key", found.key}, {"difference", to_string(found.kind)}};
    if (!found.a.empty()) entry["a"] = found.a;
    if (!found.b.empty()) entry["b"] = found.b;
    if (found.values) {
      entry["differing"] = found.differing;
      entry["elements"] = found.elements;
      entry["max"] = number(found.max);
      entry["mean"] = number(found.mean);
      entry["first"] = found.first.span();
      entry["first_a"] = found.first_a;
      entry["first_b"] = found.first_b;
    }
    out["differences"].push_back(std::move(entry));
  }
  fmt::print("{}\n", out.dump(2, ' ', false, Json::error_handler_t::replace));
}

std::string values_text(const Difference& found) {
  if (!found.values) return found.kind == Difference::Kind::kDTypes ? "; equal values" : "";
  return fmt::format("{} of {} differ, by at most {:.3g} (mean {:.3g}), first at {}: {} and {}",
                     grouped(found.differing), counted(found.elements, "element"), found.max,
                     found.mean, to_string(found.first), found.first_a, found.first_b);
}

std::string text_of(const Difference& found) {
  switch (found.kind) {
    case Difference::Kind::kOnlyInA:
      return "only in A: " + printable(found.a);
    case Difference::Kind::kOnlyInB:
      return "only in B: " + printable(found.b);
    case Difference::Kind::kDTypes:
      return fmt::format("{} in A, {} in B{}{}", found.a, found.b, found.values ? "; " : "",
                         values_text(found));
    case Difference::Kind::kValues:
      return values_text(found);
    case Difference::Kind::kKinds:
    case Difference::Kind::kShapes:
    case Difference::Kind::kObjects:
      break;
  }
  return fmt::format("{} in A, {} in B", printable(found.a), printable(found.b));
}

}  // namespace

int diff(const DiffCommand& command) {
  DiffOptions options;
  options.keys = command.keys;
  for (const std::string& rule : command.rename) {
    options.rename_a.push_back(parse_rename_rule(rule));
  }
  options.atol = command.atol;
  options.reading.follow_links = command.follow_links;
  options.progress = command.json ? nullptr : progress_line();
  DiffReport report;
  end_in_order([&](std::shared_ptr<const Interrupt> interrupt) {
    options.interrupt = std::move(interrupt);
    report = tilestone::diff(location_of(command.a, command.follow_links),
                             location_of(command.b, command.follow_links), options);
  });
  if (command.json) {
    print_json(report);
    return report.same() ? kOk : kDamaged;
  }
  for (const Difference& found : report.differences) {
    fmt::print("{}: {}\n", printable(found.key), text_of(found));
  }
  fmt::print("{}: {} and {} are equal{}, {} in {:.2f} s\n",
             report.same() ? "no difference" : counted(report.differences.size(), "difference"),
             counted(report.equal_tensors, "tensor"), counted(report.equal_objects, "object"),
             command.atol > 0 ? fmt::format(" within {}", command.atol) : "",
             human_bytes(report.bytes), report.seconds);
  return report.same() ? kOk : kDamaged;
}

}  // namespace tilestone::cli
