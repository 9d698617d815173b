// tilestone ls: prints one line per key of a checkpoint, or per step of a run.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "tilestone/base/natural_order.h"
#include "tilestone/cli/commands.h"
#include "tilestone/cli/opened.h"
#include "tilestone/cli/output.h"
#include "tilestone/cli/run.h"
#include "tilestone/cli/runs.h"
#include "tilestone/cli/tree.h"

namespace tilestone::cli {
namespace {

struct ListedRow {
  const StoredTensor* tensor = nullptr;  // null: an object
  std::string key;
  uint64_t bytes = 0;  // of the whole tensor, or of the object's item
  size_t shards = 1;
  std::string unsupported = {};  // StoredObject::unsupported
};

using Json = nlohmann::ordered_json;

std::vector<ListedRow> select(const Metadata& metadata, const LsOptions& options) {
  std::vector<ListedRow> rows;
  for (const StoredTensor& tensor : metadata.tensors) {
    if (!matches(options.patterns, tensor.key)) continue;
    const uint64_t bytes = static_cast<uint64_t>(numel(tensor.shape)) * itemsize(tensor.dtype);
    rows.push_back({&tensor, tensor.key, bytes, tensor.chunks.size()});
  }
  for (const StoredObject& object : metadata.objects) {
    if (!matches(options.patterns, object.key)) continue;
    rows.push_back({nullptr, object.key, object.at.length, 1, object.unsupported});
  }
  std::stable_sort(rows.begin(), rows.end(), [](const ListedRow& a, const ListedRow& b) {
    return natural_less(a.key, b.key);
  });
  return rows;
}

struct Totals {
  uint64_t tensors = 0, tensor_bytes = 0, shards = 0, objects = 0, object_bytes = 0;
};

Totals total(const std::vector<ListedRow>& rows) {
  Totals sum;
  for (const ListedRow& row : rows) {
    if (row.tensor != nullptr) {
      ++sum.tensors;
      sum.tensor_bytes += row.bytes;
      sum.shards += row.shards;
    } else {
      ++sum.objects;
      sum.object_bytes += row.bytes;
    }
  }
  return sum;
}

Json json_of(const std::vector<ListedRow>& rows, const Totals& sum, const Checkpoint& checkpoint) {
  const Metadata& metadata = checkpoint.metadata();
  Json out;
  out["tensors"] = Json::array();
  out["objects"] = Json::array();
  for (const ListedRow& row : rows) {
    if (row.tensor != nullptr) {
      out["tensors"].push_back({{"key", row.key},
                                {"dtype", to_string(row.tensor->dtype)},
                                {"shape", row.tensor->shape.span()},
                                {"shards", row.shards},
                                {"bytes", row.bytes}});
    } else {
      out["objects"].push_back({{"key", row.key}, {"bytes", row.bytes}});
      if (!row.unsupported.empty()) out["objects"].back()["unsupported"] = row.unsupported;
    }
  }
  out["notes"] = metadata.notes;
  out["has_common"] = checkpoint.has_common();
  out["total"] = {{"tensors", sum.tensors},
                  {"tensor_bytes", sum.tensor_bytes},
                  {"shards", sum.shards},
                  {"objects", sum.objects},
                  {"object_bytes", sum.object_bytes},
                  {"copies", copies_in(metadata)},
                  {"copy_bytes", copy_bytes(metadata)}};
  return out;
}

void print_rows(const std::vector<ListedRow>& rows, const Totals& sum, const Metadata& metadata,
                bool wide) {
  Table table({"KEY", "DTYPE", "SHAPE", "SHARDS", "BYTES"}, "lllrr");
  for (const ListedRow& row : rows) {
    const bool tensor = row.tensor != nullptr;
    const std::string kind = row.unsupported.empty() ? "object" : "unsupported";
    table.add({key_text(row.key), tensor ? std::string(to_string(row.tensor->dtype)) : kind,
               tensor ? shape_text(row.tensor->shape) : "",
               tensor ? std::to_string(row.shards) : "", human_bytes(row.bytes)});
  }
  table.print(wide);
  fmt::print("{} in {}, {}; {}, {}\n", counted(sum.tensors, "tensor"), counted(sum.shards, "shard"),
             human_bytes(sum.tensor_bytes), counted(sum.objects, "object"),
             human_bytes(sum.object_bytes));
  if (const uint64_t copies = copies_in(metadata); copies > 0) {
    fmt::print("copies of shards and objects, in other files: {}, {}\n", grouped(copies),
               human_bytes(copy_bytes(metadata)));
  }
}

Json list_checkpoint(const Location& location, const LsOptions& options) {
  const Checkpoint checkpoint = Checkpoint::open(location);
  const Metadata& metadata = checkpoint.metadata();
  const std::vector<ListedRow> rows = select(metadata, options);
  const std::vector<std::string> unmatched = unmatched_patterns(checkpoint, options.patterns);
  if (rows.empty() && !unmatched.empty()) refuse_patterns(checkpoint, unmatched);
  const Totals sum = total(rows);
  Json out;
  if (options.tree) {
    out = print_tree(metadata, options);
  } else if (options.json) {
    out = json_of(rows, sum, checkpoint);
  } else {
    print_rows(rows, sum, metadata, options.wide);
  }
  if (!options.json && options.patterns.empty()) {
    print_about_common(checkpoint);
    print_notes(metadata.notes);
  }
  if (!unmatched.empty()) refuse_patterns(checkpoint, unmatched);
  return out;
}

// ---- The steps of a run

double now_in_seconds() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

// "12 s", "3.5 h", "2.0 days"
std::string age_text(const std::optional<double>& time) {
  if (!time) return "-";
  const double seconds = std::max(0.0, now_in_seconds() - *time);
  if (seconds < 120) return fmt::format("{:.0f} s", seconds);
  if (seconds < 7200) return fmt::format("{:.0f} min", seconds / 60);
  if (seconds < 2 * 86400) return fmt::format("{:.1f} h", seconds / 3600);
  return fmt::format("{:.1f} days", seconds / 86400);
}

// "torch_dist", or with a dialect that is not PyTorch's "torch_dist, megatron".
std::string format_text(const StepInfo& step) {
  if (step.format.empty()) return "-";
  return step.dialect == "pytorch" ? step.format : step.format + ", " + step.dialect;
}

std::string state_text(StepState state) {
  const Colour colour = state == StepState::kDurable ? Colour::kGood : Colour::kNeedsCare;
  return coloured(to_string(state), colour);
}

// Which run saved the step, and whether it has left the step behind. "-": there is no checkpoint.
std::string line_text(const StepInfo& step, const Line& followed) {
  if (!is_checkpoint(step)) return "-";
  const bool abandoned = !followed.empty() && is_abandoned(step, followed);
  return printable(run_name(step.lineage)) + (abandoned ? ", abandoned" : "");
}

Json json_of(const StepInfo& step) {
  Json out = {{"step", step.step},
              {"name", step.name},
              {"state", to_string(step.state)},
              {"problem", step.problem},
              {"is_saved_to", step.is_saved_to},
              {"is_link", step.is_link},
              {"bytes", step.bytes}};
  out["time"] = step.time ? Json(*step.time) : Json();
  out["format"] = step.format;
  out["dialect"] = step.dialect;
  out["writer"] = step.writer;
  out["metrics"] = step.metrics;
  const Lineage& lineage = step.lineage;
  out["line"] = is_checkpoint(step) ? Json(run_name(lineage)) : Json();
  out["ordinal"] = lineage.ordinal;
  out["parent"] = lineage.parent ? Json(lineage.parent->step) : Json();
  return out;
}

Json list_run(const std::vector<StepInfo>& steps, const LsOptions& options) {
  if (!options.patterns.empty() && options.at.paths.size() == 1) {
    throw Error(ErrorCode::kInvalidArgument, "\"" + options.patterns.front() +
                                                 "\" is neither a path nor a step's key: this is a "
                                                 "run's directory")
        .with_hint("to list keys, give the folder of a step, for example " +
                   (steps.empty() ? std::string("step-1") : steps.back().name));
  }
  const Line followed = followed_line(steps);
  Json out;
  out["steps"] = Json::array();
  for (const StepInfo& step : steps) {
    out["steps"].push_back(json_of(step));
    out["steps"].back()["followed"] = is_on(followed, step);
  }
  if (options.json) return out;
  Table table({"STEP", "FOLDER", "STATE", "SIZE", "AGE", "LINE", "FORMAT", "WRITER"}, "rllrrlll");
  table.shorten({7, 1});
  for (const StepInfo& step : steps) {
    table.add({std::to_string(step.step), printable(step.name), state_text(step.state),
               human_bytes(step.bytes), age_text(step.time), line_text(step, followed),
               format_text(step), step.writer.empty() ? "-" : printable(step.writer)});
  }
  table.print(options.wide);
  if (!followed.empty() && !steps_beside(steps, followed).empty()) {
    fmt::print("a run continues from step {}, which was saved last\n", followed.front()->step);
  }
  for (const StepInfo& step : steps) {
    if (!step.problem.empty()) {
      fmt::print("{} is {}: {}\n", printable(step.name), to_string(step.state),
                 printable(step.problem));
    }
  }
  return out;
}

}  // namespace

int ls(const LsOptions& given) {
  LsOptions options = given;
  std::vector<std::string>& paths = options.at.paths;
  const auto first_pattern =
      std::stable_partition(paths.begin() + 1, paths.end(), [](const std::string& word) {
        std::error_code none;
        return std::filesystem::is_directory(word, none) ||
               (is_file_opened(word) && std::filesystem::is_regular_file(word, none));
      });
  options.patterns.assign(first_pattern, paths.end());
  paths.erase(first_pattern, paths.end());
  return for_each_path(paths, paths.size() == 1, options.json, [&](const std::string& path) {
    const auto steps = steps_of_run(options.at.run(path));
    return Said{kOk, steps ? list_run(*steps, options)
                           : list_checkpoint(location_of(path, options.at.follow_links), options)};
  });
}

}  // namespace tilestone::cli
