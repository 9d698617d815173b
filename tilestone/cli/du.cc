// tilestone du: how many bytes each part of a checkpoint has, by prefix of the keys, by rank, or by
// file.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "tilestone/base/natural_order.h"
#include "tilestone/cli/commands.h"
#include "tilestone/cli/key_tree.h"
#include "tilestone/cli/opened.h"
#include "tilestone/cli/output.h"
#include "tilestone/cli/run.h"

namespace tilestone::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Usage {
  std::string name;
  uint64_t tensors = 0;  // by prefix: tensors; otherwise chunks
  uint64_t objects = 0;
  uint64_t bytes = 0;
};

// `prefix`: what stands before the names of the node's children, with its separator.
void add_prefixes(const KeyNode& node, const std::string& prefix, int depth,
                  std::vector<Usage>& rows) {
  for (const auto& [name, child] : node.children) {
    const std::string key = prefix + name;
    if (depth > 1 && !child.children.empty()) {
      add_prefixes(child, key + (key.ends_with('/') ? "" : "."), depth - 1, rows);
    } else {
      const bool is_prefix = !child.children.empty();
      const std::string rest = !is_prefix ? "" : key.ends_with('/') ? "*" : ".*";
      rows.push_back({key + rest, child.tensors, child.objects, child.bytes});
    }
  }
}

// The bytes of items by the text that `name_of` gives their file. Copies count too: they are in
// other ranks' files.
template <typename NameOf>
std::vector<Usage> by_file(const Metadata& metadata, const std::vector<std::string>& patterns,
                           const NameOf& name_of) {
  std::map<std::string, Usage> rows;
  for_each_item(metadata, [&](const std::string& key, const ItemLocation& at, bool is_object) {
    if (!matches(patterns, key)) return;
    Usage& row = rows[name_of(metadata.files[at.file])];
    row.bytes += at.length;
    ++(is_object ? row.objects : row.tensors);
  });
  std::vector<Usage> found;
  for (auto& [name, row] : rows) {
    row.name = name;
    found.push_back(std::move(row));
  }
  return found;
}

std::vector<Usage> by_rank(const Checkpoint& checkpoint, const std::vector<std::string>& patterns) {
  return by_file(checkpoint.metadata(), patterns, [&](const std::string& name) {
    if (const auto rank = checkpoint.rank_of_file(name)) return fmt::format("rank {}", *rank);
    return rank_of_stock_file(name);
  });
}

std::vector<Usage> rows_of(const Checkpoint& checkpoint, const DuOptions& options) {
  std::vector<Usage> rows;
  if (options.by == "rank") {
    rows = by_rank(checkpoint, options.patterns);
  } else if (options.by == "file") {
    rows = by_file(checkpoint.metadata(), options.patterns,
                   [](const std::string& name) { return name; });
  } else {
    add_prefixes(tree_of_keys(checkpoint.metadata(), options.patterns), "", options.depth, rows);
  }
  std::stable_sort(rows.begin(), rows.end(), [&](const Usage& a, const Usage& b) {
    if (!options.by_name && a.bytes != b.bytes) return a.bytes > b.bytes;
    return natural_less(a.name, b.name);
  });
  return rows;
}

}  // namespace

int du(const DuOptions& options) {
  const Checkpoint checkpoint = Checkpoint::open(location_of(options.path, options.follow_links));
  const std::vector<Usage> rows = rows_of(checkpoint, options);
  const std::vector<std::string> unmatched = unmatched_patterns(checkpoint, options.patterns);
  if (rows.empty() && !unmatched.empty()) refuse_patterns(checkpoint, unmatched);
  uint64_t bytes = 0;
  for (const Usage& row : rows) bytes += row.bytes;
  const char* const what = options.by == "prefix" ? "tensors" : "chunks";
  if (options.json) {
    Json out = {{"by", options.by}, {"bytes", bytes}};
    out["rows"] = Json::array();
    for (const Usage& row : rows) {
      out["rows"].push_back({{"name", row.name},
                             {what, row.tensors},
                             {"objects", row.objects},
                             {"bytes", row.bytes}});
    }
    print_json(out);
    if (!unmatched.empty()) refuse_patterns(checkpoint, unmatched);
    return kOk;
  }
  Table table({"NAME", options.by == "prefix" ? "TENSORS" : "CHUNKS", "OBJECTS", "BYTES", "%"},
              "lrrrr");
  for (const Usage& row : rows) {
    const double share =
        bytes > 0 ? 100.0 * static_cast<double>(row.bytes) / static_cast<double>(bytes) : 0;
    table.add({key_text(row.name), grouped(row.tensors), grouped(row.objects),
               human_bytes(row.bytes), fmt::format("{:.1f}", share)});
  }
  table.print(options.wide);
  fmt::print("total {}\n", human_bytes(bytes));
  print_about_common(checkpoint);
  if (!unmatched.empty()) refuse_patterns(checkpoint, unmatched);
  return kOk;
}

}  // namespace tilestone::cli
