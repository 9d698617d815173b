// tilestone diff: compares two checkpoints, of any formats and layouts.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/cli/commands.h"
#include "tilestone/cli/opened.h"
#include "tilestone/cli/output.h"
#include "tilestone/cli/run.h"
#include "tilestone/cli/stopping.h"

namespace tilestone::cli {
namespace {

using Json = nlohmann::ordered_json;

Json number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

Json json_of(const DiffReport& report) {
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
  return out;
}

// What is said of a difference, in parts that stand on one line if they fit.
std::vector<std::string> parts_of(const Difference& found) {
  switch (found.kind) {
    case Difference::Kind::kOnlyInA:
      return {"only in A: " + printable(found.a)};
    case Difference::Kind::kOnlyInB:
      return {"only in B: " + printable(found.b)};
    default:
      break;
  }
  std::vector<std::string> parts;
  if (found.kind != Difference::Kind::kValues) {
    parts = {printable(found.a) + " in A,", printable(found.b) + " in B"};
  }
  if (found.kind == Difference::Kind::kDTypes) {
    parts = {parts[0] + " " + parts[1] + (found.values ? ";" : "; equal values")};
  }
  if (found.values) {
    parts.push_back(fmt::format("{} of {} differ, by at most {:.3g} (mean {:.3g}),",
                                grouped(found.differing), counted(found.elements, "element"),
                                found.max, found.mean));
    parts.push_back(fmt::format("first at {}: {} and {}", to_string(found.first), found.first_a,
                                found.first_b));
  }
  return parts;
}

// One line, or several of at most `width` columns; 0: any number. Objects that are too long even
// for a line of their own are shortened, and so is the key.
std::string text_of(const Difference& found, size_t width) {
  constexpr size_t kIndent = 4, kLeastKey = 20;
  const std::vector<std::string> parts = parts_of(found);
  std::string key = key_text(found.key) + ":";
  if (width > kLeastKey + kIndent) {
    const size_t taken = width_of(parts.front()) + 1;
    key = shortened(key, std::max(kLeastKey, width - std::min(width, taken)));
  }
  std::string text = key;
  size_t column = width_of(key);
  for (const std::string& part : parts) {
    const size_t needed = width_of(part) + 1;
    const bool fits = width == 0 || column + needed <= width || column <= kIndent;
    if (!fits) {
      text += "\n" + std::string(kIndent - 1, ' ');
      column = kIndent - 1;
    }
    const bool whole = width <= kIndent || column + needed <= width;
    text += " " + (whole ? part : shortened(part, std::max<size_t>(width - column - 1, 5)));
    column += needed;
  }
  return text;
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
    print_json(json_of(report));
    return report.same() ? kOk : kDamaged;
  }
  const size_t width = command.wide ? 0 : terminal_width();
  for (const Difference& found : report.differences) {
    fmt::print("{}\n", text_of(found, width));
  }
  fmt::print("{}: {} and {} are equal{}, {} in {:.2f} s\n",
             report.same() ? "no difference" : counted(report.differences.size(), "difference"),
             counted(report.equal_tensors, "tensor"), counted(report.equal_objects, "object"),
             command.atol > 0 ? fmt::format(" within {}", command.atol) : "",
             human_bytes(report.bytes), report.seconds);
  return report.same() ? kOk : kDamaged;
}

}  // namespace tilestone::cli
