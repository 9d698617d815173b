#include "tilestone/engine/read/subtrees_internal.h"

#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/read/key_prefixes_internal.h"
#include "tilestone/engine/read/key_runs_internal.h"

namespace tilestone::engine {
namespace {

// ---- Subtrees ----

struct WantedPath {
  const Path* subtree;
  Path above;  // the stored path, down to the subtree
  Path rest;   // and below it
  StateNode node;
};

// Collects what the checkpoint has below the subtrees, in the order of paths.
class Finder {
 public:
  explicit Finder(const std::vector<Path>& subtrees) {
    for (const Path& path : subtrees) subtrees_.emplace(dotted(path), &path);
  }

  void add(const std::string& key, const Path& path, StateNode node) {
    any_prefix(key, path, [&](std::string_view prefix, size_t elements) {
      const auto found = subtrees_.find(std::string(prefix));
      if (found == subtrees_.end() || found->second->size() != elements) return false;
      const auto rest = path.begin() + static_cast<ptrdiff_t>(elements);
      found_.push_back(
          {found->second, Path(path.begin(), rest), Path(rest, path.end()), std::move(node)});
      return true;
    });
  }

  std::vector<WantedPath> take() && {
    std::stable_sort(found_.begin(), found_.end(),
                     [](const WantedPath& a, const WantedPath& b) { return a.rest < b.rest; });
    return std::move(found_);
  }

 private:
  std::unordered_map<std::string, const Path*> subtrees_;
  std::vector<WantedPath> found_;
};

bool is_null(const StateNode& node) {
  const auto* value = node.get_if<Value>();
  return value != nullptr && value->is_null();
}

// The node at a path of the caller's tree, in which ints may be keys of dicts. Null if a node on
// the way is not a container.
StateNode* node_at(StateDict& tree, const Path& path) {
  StateNode* node = nullptr;
  StateDict* dict = &tree;
  for (const PathElement& element : path) {
    if (node != nullptr) {
      if (is_null(*node)) *node = StateDict();
      dict = node->get_if<StateDict>();
    }
    if (dict != nullptr) {
      node = &(*dict)[element];
      continue;
    }
    auto* list = node->get_if<StateList>();
    const auto* index = std::get_if<int64_t>(&element);
    if (list == nullptr || index == nullptr || *index < 0) return nullptr;
    if (static_cast<size_t>(*index) >= list->size()) return nullptr;
    node = &(*list)[static_cast<size_t>(*index)];
  }
  return node;
}

// The child of `node` at an element of a stored path, in which ints are list indices and keys of
// dicts are text. `keys`: what the keys of that dict were; null if they were text. In a list only
// the last child and a new one after it are possible. Null if there is no such place.
StateNode* child_of(StateNode& node, const PathElement& element, const DictKeys* keys) {
  if (const auto* index = std::get_if<int64_t>(&element)) {
    if (is_null(node) || is_empty_list(node)) node = StateList();
    auto* list = node.get_if<StateList>();
    if (list == nullptr || *index < 0) return nullptr;
    const auto place = static_cast<size_t>(*index);
    if (place == list->size()) list->emplace_back();
    return place + 1 == list->size() ? &list->back() : nullptr;
  }
  if (is_null(node)) node = StateDict();
  auto* dict = node.get_if<StateDict>();
  if (dict == nullptr) return nullptr;
  if (keys == nullptr) return &(*dict)[element];
  StateDict one;
  one[element];
  restore_keys(one, *keys);
  dict->original_keys().merge(one.original_keys());
  return &(*dict)[one.entries().front().first];
}

// ---- What is left out ----

[[noreturn]] void refuse_left_out(const std::vector<std::string>& keys) {
  throw Error(ErrorCode::kMismatch,
              "the checkpoint holds state of a loaded object that the object's state_dict() does "
              "not request: " +
                  list_keys(keys))
      .with_key(keys.front())
      .with_reason(Reason::kNotRequested)
      .with_hint(Hint{{"create the object's state before the load, or load a dict of the wanted "
                       "keys instead of the object"},
                      {std::string(kHintAtOptimizers)},
                      {"", "differences.not_requested", "report", " loads without them"}});
}

}  // namespace

bool is_empty_list(const StateNode& node) {
  const auto* value = node.get_if<Value>();
  return value != nullptr && value->kind() == Value::Kind::kList && value->items().empty();
}

StateDict with_subtrees(StateDict wanted, const std::vector<Path>& subtrees,
                        const Metadata& stored) {
  if (subtrees.empty()) return wanted;
  Finder finder(subtrees);
  for (const StoredTensor& tensor : stored.tensors) {
    finder.add(tensor.key, tensor.path, TensorView::without_data(tensor.dtype, tensor.shape));
  }
  for (const StoredObject& object : stored.objects) finder.add(object.key, object.path, Value());
  for (const Path& path : empty_dicts(stored)) finder.add(dotted(path), path, StateDict());
  for (WantedPath& found : std::move(finder).take()) {
    StateNode* node = node_at(wanted, *found.subtree);
    Path& path = found.above;  // of the stored dict or list `node`
    for (const PathElement& element : found.rest) {
      const auto keys = stored.dict_keys.find(path);
      const bool are_known = keys != stored.dict_keys.end();
      if (node != nullptr) node = child_of(*node, element, are_known ? &keys->second : nullptr);
      path.push_back(element);
    }
    if (node != nullptr && is_null(*node)) *node = std::move(found.node);
  }
  return wanted;
}

Bytes left_out(const std::vector<Path>& complete, const Items& asked, const Metadata& stored) {
  if (complete.empty()) return {};
  std::unordered_set<std::string> claims;
  for (const Path& path : complete) claims.insert(dotted(path));
  const std::unordered_set<std::string_view> keys = keys_of(asked);
  KeyRuns claimed, left;
  for (size_t i = 0; i < count_keys(stored); ++i) {
    const std::string& key = key_of(stored, i);
    if (!any_prefix(key, path_of(stored, i), [&](std::string_view prefix, size_t) {
          return claims.contains(std::string(prefix));
        })) {
      continue;
    }
    claimed.add(i);
    if (!keys.contains(key)) left.add(i);
  }
  ByteWriter writer;
  claimed.write(writer);
  left.write(writer);
  return std::move(writer).take();
}

NamedPaths::NamedPaths(const Items& asked) {
  const Path* last = nullptr;  // the container of the item before
  const auto add = [&](const Path& path) {
    if (path.size() < 2) return;
    if (last != nullptr && last->size() == path.size() &&
        std::equal(path.begin(), path.end() - 1, last->begin())) {
      return;
    }
    last = &path;
    for (Path above(path.begin(), path.end() - 1); !above.empty(); above.pop_back()) {
      if (!paths_.insert(dotted(above)).second) break;
    }
  };
  for (const TensorItem& item : asked.tensors) add(item.path);
  last = nullptr;
  for (const ObjectItem& item : asked.objects) add(item.path);
  for (const auto& [path, keys] : asked.dict_keys) paths_.insert(dotted(path));
}

bool NamedPaths::hold(const std::string& key, const Path& path) const {
  return any_prefix(key, path, [&](std::string_view prefix, size_t) {
    return paths_.contains(std::string(prefix));
  });
}

void check_left_out(const std::vector<Bytes>& of_ranks, const Metadata& stored) {
  const size_t size = count_keys(stored);
  KeyCounts claimed(size), left(size);
  for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
    if (of_ranks[rank].empty()) continue;
    ByteReader reader(of_ranks[rank],
                      "list of keys that rank " + std::to_string(rank) + " left out");
    claimed.add(reader);
    left.add(reader);
    reader.expect_end();
  }
  std::vector<std::string> keys;
  for (size_t i = 0; i < size; ++i) {
    const int64_t claiming = claimed.next(i);
    if (left.next(i) == claiming && claiming > 0) keys.push_back(key_of(stored, i));
  }
  if (!keys.empty()) refuse_left_out(keys);
}

}  // namespace tilestone::engine
