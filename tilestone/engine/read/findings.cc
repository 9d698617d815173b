#include "tilestone/engine/read/findings_internal.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "tilestone/base/both_ways.h"
#include "tilestone/base/error.h"
#include "tilestone/base/size_text.h"
#include "tilestone/engine/read/key_runs_internal.h"
#include "tilestone/engine/read/subtrees_internal.h"
#include "tilestone/state/node_walk.h"
#include "tilestone/state/sharded.h"

namespace tilestone::engine {
namespace {

using Policy = Differences::Policy;

// The keys of the checkpoint; with objects_by_grid also those of its grids of objects.
class StoredKeys {
 public:
  StoredKeys(const Metadata& stored, const LoadOptions& options) : stored_(stored) {
    if (!options.objects_by_grid) return;
    for (const StoredObject& object : stored.objects) grids_.insert(grid_key(object.key));
  }

  bool has(const std::string& key) const {
    return stored_.find_tensor(key) != nullptr || stored_.find_object(key) != nullptr;
  }
  bool has_object(const std::string& key) const {
    return has(key) || grids_.contains(grid_key(key));
  }

 private:
  const Metadata& stored_;
  std::unordered_set<std::string_view> grids_;  // empty without objects_by_grid
};

// The keys that a rank's items request; with objects_by_grid also those of their grids.
class RequestedKeys {
 public:
  RequestedKeys(const Items& wanted, const LoadOptions& options) : keys_(keys_of(wanted)) {
    if (!options.objects_by_grid) return;
    for (const ObjectItem& object : wanted.objects) grids_.insert(grid_key(object.key));
  }

  bool have(const std::string& key) const {
    return keys_.contains(key) || grids_.contains(grid_key(key));
  }

 private:
  std::unordered_set<std::string_view> keys_;
  std::unordered_set<std::string_view> grids_;
};

// The key under which an object is reported.
std::string reported_key(const std::string& key, const LoadOptions& options) {
  return options.objects_by_grid ? std::string(grid_key(key)) : key;
}

bool has_other_shape(const TensorItem& item, const Metadata& stored) {
  const StoredTensor* found = stored.find_tensor(item.key);
  if (found == nullptr || found->shape == item.global_shape) return false;
  return !item.allow_shape_mismatch || found->shape.size() != item.global_shape.size();
}

void walk_report(auto& io, auto& report) {
  both::texts(io, report.not_in_checkpoint);
  both::texts(io, report.not_requested);
  both::texts(io, report.other_shape);
}

bool looks_for_rest(const LoadOptions& options) {
  return options.differences.not_requested == Policy::kError ||
         options.differences.not_requested == Policy::kReport;
}

void expect_kept_data(const StateNode& wanted, const StateNode& built, const KeptLeaves& kept) {
  if (const auto* factory = wanted.get_if<ShardedTensorFactory>()) {
    if (factory->data.has_data()) return;
    const std::string* key = nullptr;
    for_each_node(built, [&](const StateNode& node, const Path&) {
      const auto* tensor = node.get_if<ShardedTensor>();
      if (tensor == nullptr || key != nullptr) return;
      if (kept.keys.contains(tensor->key)) key = &tensor->key;
    });
    if (key == nullptr) return;
    throw Error(ErrorCode::kNotFound, "a part of the tensor of the factory " + factory->key +
                                          " can't be loaded, and the template has no memory whose "
                                          "values could be kept instead")
        .with_key(*key)
        .with_hint("give the factory's tensor memory before the load, or leave it out");
  }
  const auto* dict = wanted.get_if<StateDict>();
  const auto* built_dict = built.get_if<StateDict>();
  if (dict != nullptr && built_dict != nullptr) {
    engine::expect_kept_data(*dict, *built_dict, kept);
    return;
  }
  const auto* list = wanted.get_if<StateList>();
  const auto* built_list = built.get_if<StateList>();
  if (list == nullptr || built_list == nullptr) return;
  for (size_t i = 0; i < list->size() && i < built_list->size(); ++i) {
    expect_kept_data((*list)[i], (*built_list)[i], kept);
  }
}

// Whether somebody sees what is found.
bool needs_findings(const LoadOptions& options) {
  return options.log_report || options.differences.report != nullptr ||
         options.differences.not_in_checkpoint == Policy::kReport ||
         options.differences.other_shape == Policy::kReport || looks_for_rest(options);
}

uint64_t bytes_of_key(const Metadata& stored, size_t number) {
  const size_t tensors = stored.tensors.size();
  if (number >= tensors) return stored.objects[number - tensors].at.length;
  const StoredTensor& tensor = stored.tensors[number];
  return static_cast<uint64_t>(numel(tensor.shape)) * itemsize(tensor.dtype);
}

// What no rank requests: all of it, or only what the templates' dicts and lists name.
struct Rest {
  std::vector<std::string> keys;
  uint64_t bytes = 0;
};

Rest requested_by_none(KeyCounts& left_out, KeyCounts& named, size_t ranks, const Metadata& stored,
                       const LoadOptions& options) {
  Rest rest;
  for (size_t i = 0; i < count_keys(stored); ++i) {
    const bool by_none = left_out.next(i) == static_cast<int64_t>(ranks);
    const bool is_named = named.next(i) > 0;
    if (!by_none || !(is_named || looks_for_rest(options))) continue;
    rest.bytes += bytes_of_key(stored, i);
    const std::string& key = key_of(stored, i);
    std::string reported = i < stored.tensors.size() ? key : reported_key(key, options);
    if (rest.keys.empty() || rest.keys.back() != reported) rest.keys.push_back(std::move(reported));
  }
  return rest;
}

[[noreturn]] void refuse(const std::vector<std::string>& keys) {
  // torch's schedulers add it to the optimizer's param_groups.
  const auto of_scheduler = std::find_if(keys.begin(), keys.end(), [](const std::string& key) {
    return key.ends_with(".initial_lr");
  });
  const Advice without{"", "differences.not_requested", "report", " loads without them"};
  throw Error(ErrorCode::kMismatch, "the checkpoint holds " + counted(keys.size(), "key") +
                                        " not requested: " + list_keys(keys))
      .with_key(of_scheduler == keys.end() ? keys.front() : *of_scheduler)
      .with_reason(Reason::kNotRequested)
      .with_hint(of_scheduler == keys.end()
                     ? Hint{without}
                     : Hint{{"initial_lr is set by a learning-rate scheduler: make the scheduler "
                             "before the load"},
                            without});
}

void warn(const std::vector<std::string>& keys, const std::string& what) {
  if (keys.empty()) return;
  log(LogLevel::kWarning,
      "load: " + counted(keys.size(), "key") + " " + what + ": " + list_keys(keys));
}

void warn_of_rest(const std::vector<std::string>& keys, uint64_t bytes,
                  const LoadOptions& options) {
  if (options.differences.not_requested == Policy::kReport) {
    warn(keys, "of the checkpoint not requested");
  } else if (!options.differences.not_requested) {
    warn(keys, "of the checkpoint (" + human_bytes(bytes) +
                   ") left out, below dicts or lists that the template has "
                   "(Differences.not_requested says what to do about them)");
  }
}

}  // namespace

bool keeps_some(const LoadOptions& options) {
  return options.differences.not_in_checkpoint != Policy::kError ||
         options.differences.other_shape != Policy::kError;
}

Findings find_kept(const Items& wanted, const Metadata& stored, const LoadOptions& options) {
  Findings found;
  const auto keep = [&](const auto& item, std::string reported, std::vector<std::string>& list) {
    list.push_back(std::move(reported));
    found.kept.keys.insert(item.key);
    if (!item.path.empty()) found.kept.paths.insert(dotted(item.path));
  };
  if (options.differences.not_in_checkpoint != Policy::kError) {
    const StoredKeys keys(stored, options);
    for (const TensorItem& item : wanted.tensors) {
      if (!keys.has(item.key)) keep(item, item.key, found.not_in_checkpoint);
    }
    for (const ObjectItem& item : wanted.objects) {
      if (keys.has_object(item.key)) continue;
      keep(item, reported_key(item.key, options), found.not_in_checkpoint);
    }
  }
  if (options.differences.other_shape != Policy::kError) {
    for (const TensorItem& item : wanted.tensors) {
      if (has_other_shape(item, stored)) keep(item, item.key, found.other_shape);
    }
  }
  return found;
}

void expect_kept_data(const StateDict& wanted, const StateDict& built, const KeptLeaves& kept) {
  for (const auto& [key, node] : wanted.entries()) {
    const StateNode* made = built.find(key);
    if (made != nullptr) expect_kept_data(node, *made, kept);
  }
}

Bytes encode_findings(const Findings& findings, const Items& wanted, bool is_template,
                      const Metadata& stored, const LoadOptions& options) {
  if (!needs_findings(options)) return {};
  ByteWriter writer;
  const std::vector<std::string> none;
  both::texts(writer, options.differences.not_in_checkpoint == Policy::kReport
                          ? findings.not_in_checkpoint
                          : none);
  both::texts(writer,
              options.differences.other_shape == Policy::kReport ? findings.other_shape : none);
  KeyRuns left_out, named;
  if (is_template) {
    const RequestedKeys requested(wanted, options);
    std::optional<NamedPaths> paths;
    for (size_t i = 0; i < count_keys(stored); ++i) {
      const std::string& key = key_of(stored, i);
      if (requested.have(key)) continue;
      left_out.add(i);
      if (!paths) paths.emplace(wanted);
      if (paths->hold(key, path_of(stored, i))) named.add(i);
    }
  }
  left_out.write(writer);
  named.write(writer);
  return std::move(writer).take();
}

LoadReport unite_findings(const std::vector<Bytes>& of_ranks, const Metadata& stored,
                          const LoadOptions& options) {
  if (!needs_findings(options)) return {};
  std::set<std::string> missing, other;
  KeyCounts left_out(count_keys(stored)), named(count_keys(stored));
  for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
    if (of_ranks[rank].empty()) continue;  // its options say that nobody sees them
    ByteReader reader(of_ranks[rank], "message with the findings of rank " + std::to_string(rank));
    both::texts(reader, missing);
    both::texts(reader, other);
    left_out.add(reader);
    named.add(reader);
    reader.expect_end();
  }
  LoadReport report;
  report.not_in_checkpoint.assign(missing.begin(), missing.end());
  report.other_shape.assign(other.begin(), other.end());
  const Rest rest = requested_by_none(left_out, named, of_ranks.size(), stored, options);
  if (options.differences.not_requested == Policy::kError && !rest.keys.empty()) refuse(rest.keys);
  const std::set<std::string> sorted(rest.keys.begin(), rest.keys.end());
  report.not_requested.assign(sorted.begin(), sorted.end());
  if (!options.log_report) return report;
  warn(report.not_in_checkpoint, "not in the checkpoint");
  warn_of_rest(report.not_requested, rest.bytes, options);
  warn(report.other_shape, "with another shape in the checkpoint");
  return report;
}

Bytes encode_report(const LoadReport& report) {
  ByteWriter writer;
  walk_report(writer, report);
  return std::move(writer).take();
}

LoadReport decode_report(ByteView bytes) {
  LoadReport report;
  if (bytes.empty()) return report;
  ByteReader reader(bytes, "report of a load");
  walk_report(reader, report);
  reader.expect_end();
  return report;
}

}  // namespace tilestone::engine
