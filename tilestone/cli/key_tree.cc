#include "tilestone/cli/key_tree.h"

#include <vector>

#include "tilestone/cli/output.h"

namespace tilestone::cli {
namespace {

constexpr size_t kMaxParts = 200;  // the rest of a key is one part

// The nodes from the root to the key's own.
std::vector<KeyNode*> nodes_of(KeyNode& root, std::string_view key) {
  std::vector<KeyNode*> nodes{&root};
  do {
    // A separator at the end of the key belongs to its last part.
    size_t end = nodes.size() < kMaxParts ? key.find_first_of("./", 1) : std::string_view::npos;
    if (end == key.size() - 1) end = std::string_view::npos;
    const bool is_last = end == std::string_view::npos;
    const std::string_view part = key.substr(0, is_last || key[end] == '.' ? end : end + 1);
    nodes.push_back(&nodes.back()->children[std::string(part)]);
    key.remove_prefix(is_last ? key.size() : end + 1);
  } while (!key.empty());
  return nodes;
}

}  // namespace

KeyNode tree_of_keys(const Metadata& metadata, const std::vector<std::string>& patterns) {
  KeyNode root;
  for (const StoredTensor& tensor : metadata.tensors) {
    if (!matches(patterns, tensor.key)) continue;
    const auto nodes = nodes_of(root, tensor.key);
    nodes.back()->tensor = &tensor;
    for (KeyNode* node : nodes) {
      ++node->tensors;
      node->bytes += static_cast<uint64_t>(numel(tensor.shape)) * itemsize(tensor.dtype);
    }
  }
  for (const StoredObject& object : metadata.objects) {
    if (!matches(patterns, object.key)) continue;
    const auto nodes = nodes_of(root, object.key);
    nodes.back()->object = &object;
    for (KeyNode* node : nodes) {
      ++node->objects;
      node->bytes += object.at.length;
    }
  }
  return root;
}

}  // namespace tilestone::cli
