#include "tilestone/cli/tree.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "tilestone/cli/key_tree.h"
#include "tilestone/cli/output.h"
#include "tilestone/cli/run.h"

namespace tilestone::cli {
namespace {

using Json = nlohmann::ordered_json;

std::string content_of(const KeyNode& node) {
  if (node.children.empty() && node.tensor != nullptr) {
    return fmt::format("{} {}", to_string(node.tensor->dtype), shape_text(node.tensor->shape));
  }
  if (node.children.empty()) return "object";
  std::string text;
  if (node.tensors > 0) text = counted(node.tensors, "tensor");
  if (node.objects > 0) text += (text.empty() ? "" : ", ") + counted(node.objects, "object");
  return text;
}

// Adds the node's children. `depth`: levels that are still shown.
void add_rows(Table& table, const KeyNode& node, const std::string& indent, int depth) {
  if (depth == 0) return;
  size_t left = node.children.size();
  for (const auto& [name, child] : node.children) {
    const bool last = --left == 0;
    table.add({indent + (last ? "`-- " : "|-- ") + key_text(name), content_of(child),
               human_bytes(child.bytes)});
    add_rows(table, child, indent + (last ? "    " : "|   "), depth - 1);
  }
}

Json json_of(const KeyNode& node, int depth) {
  Json out = {{"tensors", node.tensors}, {"objects", node.objects}, {"bytes", node.bytes}};
  if (node.tensor != nullptr) {
    out["dtype"] = to_string(node.tensor->dtype);
    out["shape"] = node.tensor->shape.span();
  }
  if (depth == 0 || node.children.empty()) return out;
  out["children"] = Json::object();
  for (const auto& [name, child] : node.children) {
    out["children"][name] = json_of(child, depth - 1);
  }
  return out;
}

}  // namespace

nlohmann::ordered_json print_tree(const Metadata& metadata, const LsOptions& options) {
  const KeyNode root = tree_of_keys(metadata, options.patterns);
  if (options.json) return json_of(root, options.depth);
  Table table({"KEY", "", "BYTES"}, "llr");
  add_rows(table, root, "", options.depth);
  table.print(options.wide);
  fmt::print("{}, {}\n", content_of(root), human_bytes(root.bytes));
  return {};
}

}  // namespace tilestone::cli
