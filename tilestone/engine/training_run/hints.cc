// A manager leaves a hint of each step in the run's directory, so that one listing answers what a
// run asks of all its steps, also where each step would cost several requests. The file's name says
// everything:
//
//   .tilestone/steps/FOLDER,ORDINAL,RUN,PARENT,PARENT'S
//   ID,AFTER,ID,BYTES,TIME,FORMAT,DIALECT,WRITER
//
// and after that NAME=VALUE for each metric. Metrics that make the name too long stand in the file
// only, whose name then ends with ",+".
//
// A hint is put once its step is durable, and removed before the removal of the step begins. So a
// step with a hint has been published, and no removal of it was killed. A crash in between leaves a
// step without a hint, at which is looked by itself, as at those that were copied in or come from
// other writers. A hint without its step is passed over, and removed by the next pruning.
//
// Nothing else is concluded: a step that is opened, restored, replaced or removed says itself what
// it is. In a file system also a listing believes a hint only if the files have the size that it
// says (is_as_hinted()); in a store that would be a request for each step.
#include "tilestone/engine/training_run/hints_internal.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "tilestone/base/bytes.h"
#include "tilestone/base/error.h"
#include "tilestone/base/number_text.h"
#include "tilestone/base/url_text.h"
#include "tilestone/engine/open/cleanup_internal.h"

namespace tilestone::engine {
namespace {

constexpr size_t kMaxHintBytes = 255;  // of a name in a directory
constexpr uint64_t kMaxContentBytes = 1u << 20;
constexpr std::string_view kMore = ",+";

std::string text_of(const std::optional<uint64_t>& number) {
  return number ? std::to_string(*number) : "";
}

std::string head_of(const StepInfo& step) {
  const Lineage& line = step.lineage;
  const std::string fields[] = {
      url_encode(step.name),
      std::to_string(line.ordinal),
      url_encode(line.run),
      line.parent ? std::to_string(line.parent->step) : "",
      line.parent ? url_encode(line.parent->save_id) : "",
      text_of(line.after),
      step.save_id,
      std::to_string(step.bytes),
      step.time ? fmt::format("{:.3f}", *step.time) : "",
      url_encode(step.format),
      url_encode(step.dialect),
      url_encode(step.writer),
  };
  return fmt::format("{}", fmt::join(fields, ","));
}

std::string text_of(const std::map<std::string, double>& metrics) {
  std::string text;
  for (const auto& [name, value] : metrics) text += fmt::format(",{}={}", url_encode(name), value);
  return text;
}

std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> fields;
  for (;;) {
    const size_t comma = text.find(',');
    fields.push_back(text.substr(0, comma));
    if (comma == std::string_view::npos) return fields;
    text.remove_prefix(comma + 1);
  }
}

// The step is not known from it: the folder's name says it. nullopt: it is no hint of this form.
std::optional<StepInfo> parse(std::string_view text) {
  const auto fields = split(text);
  if (fields.size() < 12) return std::nullopt;
  const auto ordinal = number_in<uint64_t>(fields[1]);
  const auto bytes = number_in<uint64_t>(fields[7]);
  if (!ordinal || *ordinal == 0 || !bytes || !is_save_id(fields[6])) return std::nullopt;
  StepInfo step;
  step.state = StepState::kDurable;
  step.name = url_decode(fields[0]);
  step.lineage = {.run = url_decode(fields[2]), .ordinal = *ordinal};
  if (const auto parent = number_in<uint64_t>(fields[3])) {
    step.lineage.parent = StepId{*parent, url_decode(fields[4])};
  }
  step.lineage.after = number_in<uint64_t>(fields[5]);
  step.save_id = fields[6];
  step.bytes = *bytes;
  step.time = number_in<double>(fields[8]);
  step.format = url_decode(fields[9]);
  step.dialect = url_decode(fields[10]);
  step.writer = url_decode(fields[11]);
  for (size_t i = 12; i < fields.size(); ++i) {
    const size_t equals = std::min(fields[i].find('='), fields[i].size());
    const auto value = number_in<double>(fields[i].substr(std::min(equals + 1, fields[i].size())));
    if (value) step.metrics.emplace(url_decode(fields[i].substr(0, equals)), *value);
  }
  return step;
}

}  // namespace

Hints read_hints(Storage& run) {
  Hints hints;
  for (std::string& file : run.list_files(std::string(kHints))) {
    auto step = parse(std::string_view(file).substr(kHints.size()));
    if (!step) continue;
    StepInfo& found = hints.steps[step->name];
    if (found.state == StepState::kDurable) {
      hints.void_files.push_back(found.hint);
      hints.void_files.push_back(file);
    }
    found = *std::move(step);
    found.hint = std::move(file);
  }
  for (const std::string& file : hints.void_files) {
    std::erase_if(hints.steps, [&](const auto& each) { return each.second.hint == file; });
  }
  return hints;
}

std::vector<std::string> hints_of(Storage& run, const std::string& folder) {
  return run.list_files(std::string(kHints) + url_encode(folder) + ",");
}

bool add_metrics(Storage& run, StepInfo& hinted) {
  if (!hinted.hint.ends_with(kMore)) return true;
  try {
    auto all = parse(as_text(read_file(run, hinted.hint, kMaxContentBytes)));
    if (!all || all->save_id != hinted.save_id) return false;
    hinted.metrics = std::move(all->metrics);
    return true;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kNotFound && error.code() != ErrorCode::kCorrupt) throw;
    return false;
  }
}

std::string hint_name(const Storage& run, const StepInfo& step) {
  if (step.lineage.run.empty() || !is_save_id(step.save_id)) return "";
  const std::string head = head_of(step);
  const std::string metrics = text_of(step.metrics);
  const bool fits = head.size() + metrics.size() <= kMaxHintBytes;
  const std::string base = head + (fits ? metrics : std::string(kMore));
  const std::string name = std::string(kHints) + base;
  const bool is_short = base.size() <= kMaxHintBytes && name.size() <= run.facts().max_name_bytes;
  return is_short ? name : "";
}

void put_hint(Storage& run, const StepInfo& step, const std::string& name) {
  const std::string text = head_of(step) + text_of(step.metrics);
  run.prepare_put(name, as_bytes(text), Deadline::never());  // a part of it would be misread
}

}  // namespace tilestone::engine
