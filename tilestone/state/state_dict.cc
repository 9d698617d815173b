#include "tilestone/state/state_dict.h"

#include <algorithm>
#include <optional>
#include <unordered_set>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/state/similar_keys_internal.h"

namespace tilestone {
namespace {

// Up to this size, comparing every key is as fast as a hash table.
constexpr size_t kSmallDict = 16;

std::string name_at(size_t index_in_variant) {
  constexpr std::string_view kNames[] = {"a value",          "a tensor",
                                         "a sharded tensor", "a sharded object",
                                         "a factory",        "a local, non-persistent value",
                                         "a dict",           "a list"};
  static_assert(std::size(kNames) == std::variant_size_v<StateNode::Variant>);
  return std::string(kNames[index_in_variant]);
}

Error wrong_node(const StateNode& node, const std::string& wanted) {
  std::string found = name_at(node.variant().index());
  if (const auto* value = node.get_if<Value>()) {
    found += " of kind " + std::string(to_string(value->kind()));
  }
  return Error(ErrorCode::kInvalidArgument, "the node is " + found + ", not " + wanted);
}

}  // namespace

std::string key_text(const PathElement& key) {
  const auto* text = std::get_if<std::string>(&key);
  return text != nullptr ? *text : std::to_string(std::get<int64_t>(key));
}

std::string dotted(const Path& path) {
  std::string text;
  for (const PathElement& element : path) {
    if (&element != &path.front()) text += '.';
    text += key_text(element);
  }
  return text;
}

StateDict::StateDict() noexcept = default;
StateDict::StateDict(const StateDict&) = default;
StateDict::StateDict(StateDict&&) noexcept = default;
StateDict& StateDict::operator=(const StateDict&) = default;
StateDict& StateDict::operator=(StateDict&&) noexcept = default;
StateDict::~StateDict() = default;

StateDict::Index::Index(const Index&) {}
StateDict::Index& StateDict::Index::operator=(const Index&) {
  positions.clear();
  return *this;
}

StateNode::StateNode() noexcept = default;
StateNode::StateNode(OfValue, Value value) noexcept : node_(std::move(value)) {}
StateNode::StateNode(TensorView tensor) : node_(std::move(tensor)) {}
StateNode::StateNode(ShardedTensor tensor) : node_(std::move(tensor)) {}
StateNode::StateNode(ShardedObject object) : node_(std::move(object)) {}
StateNode::StateNode(ShardedTensorFactory factory) : node_(std::move(factory)) {}
StateNode::StateNode(LocalNonpersistent value) : node_(std::move(value)) {}
StateNode::StateNode(StateDict dict) : node_(std::move(dict)) {}
StateNode::StateNode(StateList list) : node_(std::move(list)) {}
StateNode::StateNode(const StateNode&) = default;
StateNode::StateNode(StateNode&&) noexcept = default;
StateNode& StateNode::operator=(const StateNode&) = default;
StateNode& StateNode::operator=(StateNode&&) noexcept = default;
StateNode::~StateNode() = default;

std::vector<StateDict::Entry>& StateDict::entries() {
  index_.positions.clear();
  return entries_;
}

void StateDict::update_index() {
  if (entries_.size() <= kSmallDict) return;
  if (index_.positions.size() > entries_.size()) index_.positions.clear();
  for (size_t i = index_.positions.size(); i < entries_.size(); ++i) {
    index_.positions.emplace(entries_[i].first, i);
  }
}

size_t StateDict::position_of(const PathElement& key) const {
  if (index_.positions.size() == entries_.size() && !entries_.empty()) {
    const auto found = index_.positions.find(key);
    return found == index_.positions.end() ? kNowhere : found->second;
  }
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].first == key) return i;
  }
  return kNowhere;
}

void StateNode::wrong_type(size_t wanted_index) const {
  throw wrong_node(*this, name_at(wanted_index));
}

void StateNode::wrong_type(Value::Kind wanted) const {
  throw wrong_node(*this, "a value of kind " + std::string(to_string(wanted)));
}

StateNode& StateDict::operator[](const PathElement& key) {
  update_index();
  const size_t position = position_of(key);
  if (position != kNowhere) return entries_[position].second;
  StateNode& added = entries_.emplace_back(key, StateNode()).second;
  update_index();
  return added;
}

void StateDict::not_found(const PathElement& key) const {
  const std::string text = dotted({key});
  SimilarKeys similar(text);
  std::vector<std::string> others;
  for (const auto& [other, node] : entries_) others.push_back(dotted({other}));
  for (const std::string& other : others) similar.consider(other);
  std::string hint;
  for (const std::string& other : similar.best(3)) {
    hint += (hint.empty() ? "similar keys: " : ", ") + other;
  }
  throw Error(ErrorCode::kNotFound, "the dict has no such key").with_key(text).with_hint(hint);
}

StateNode& StateDict::at(const PathElement& key) {
  if (StateNode* node = find(key)) return *node;
  not_found(key);
}

const StateNode& StateDict::at(const PathElement& key) const {
  if (const StateNode* node = find(key)) return *node;
  not_found(key);
}

const StateNode* StateDict::find(const PathElement& key) const {
  const size_t position = position_of(key);
  return position == kNowhere ? nullptr : &entries_[position].second;
}

StateNode* StateDict::find(const PathElement& key) {
  update_index();
  const size_t position = position_of(key);
  return position == kNowhere ? nullptr : &entries_[position].second;
}

namespace {

// Counts one level of depth during its lifetime. Throws if the limit is reached.
class Level {
 public:
  explicit Level(size_t& depth) : depth_(depth) {
    if (depth_ == kMaxStateDepth) {
      throw Error(ErrorCode::kInvalidArgument, "the state dict is nested deeper than " +
                                                   std::to_string(kMaxStateDepth) + " levels");
    }
    ++depth_;
  }
  ~Level() { --depth_; }
  Level(const Level&) = delete;
  Level& operator=(const Level&) = delete;

 private:
  size_t& depth_;
};

template <typename T>
bool is_a(const StateNode& node) {
  return node.get_if<T>() != nullptr;
}

// Whether the subtree contains a node of type T. Stops at the first one.
template <typename T>
bool holds(const StateNode& node, size_t& depth) {
  const Level level(depth);
  if (is_a<T>(node)) return true;
  if (const auto* dict = node.get_if<StateDict>()) {
    return std::any_of(dict->begin(), dict->end(),
                       [&](const auto& entry) { return holds<T>(entry.second, depth); });
  }
  if (const auto* list = node.get_if<StateList>()) {
    return std::any_of(list->begin(), list->end(),
                       [&](const StateNode& element) { return holds<T>(element, depth); });
  }
  return false;
}

bool is_plain(const StateDict& state, size_t& depth);

bool is_plain(const StateNode& node, size_t& depth) {
  if (is_a<TensorView>(node) || is_a<Value>(node)) return true;
  const Level level(depth);
  if (is_a<ShardedTensorFactory>(node) || is_a<LocalNonpersistent>(node)) return false;
  if (const auto* dict = node.get_if<StateDict>()) return is_plain(*dict, depth);
  const auto* list = node.get_if<StateList>();
  return list == nullptr || std::all_of(list->begin(), list->end(), [&](const StateNode& element) {
           return is_plain(element, depth);
         });
}

bool is_plain(const StateDict& state, size_t& depth) {
  return std::all_of(state.begin(), state.end(),
                     [&](const auto& entry) { return is_plain(entry.second, depth); });
}

[[noreturn]] void mismatch(const Path& path, const std::string& problem) {
  throw Error(ErrorCode::kMismatch,
              "the loaded state does not have the template's structure: " + problem)
      .with_key(dotted(path));
}

// ---- build_factories ----

StateNode run_factory(const ShardedTensorFactory& factory) {
  StateNode built;
  try {
    if (!factory.build) {
      throw Error(ErrorCode::kInvalidArgument, "the factory has no build function");
    }
    built = factory.build(factory.key, factory.data, factory.replica_id, factory.flat_range);
    size_t depth = 0;
    if (holds<ShardedTensorFactory>(built, depth)) {
      throw Error(ErrorCode::kInvalidArgument,
                  "the factory's build function returned a tree that contains another factory");
    }
  } catch (...) {
    throw current_error().with_key(factory.key);
  }
  return built;
}

StateDict build_dict(const StateDict& state, size_t& depth);

StateNode build_node(const StateNode& node, size_t& depth) {
  const Level level(depth);
  if (const auto* factory = node.get_if<ShardedTensorFactory>()) return run_factory(*factory);
  if (const auto* dict = node.get_if<StateDict>()) return build_dict(*dict, depth);
  const auto* list = node.get_if<StateList>();
  if (list == nullptr) return node;
  StateList built;
  built.reserve(list->size());
  for (const StateNode& element : *list) built.push_back(build_node(element, depth));
  return built;
}

StateDict build_dict(const StateDict& state, size_t& depth) {
  StateDict built;
  built.others() = state.others();
  built.original_keys() = state.original_keys();
  auto& entries = built.entries();
  entries.reserve(state.size());
  for (const auto& [key, node] : state) entries.emplace_back(key, build_node(node, depth));
  return built;
}

// ---- drop_nonpersistent ----

StateDict drop_from_dict(const StateDict& state, size_t& depth);

StateNode drop_from_node(const StateNode& node, size_t& depth) {
  const Level level(depth);
  if (const auto* dict = node.get_if<StateDict>()) return drop_from_dict(*dict, depth);
  const auto* list = node.get_if<StateList>();
  if (list == nullptr) return node;
  StateList kept;
  for (const StateNode& element : *list) {
    if (!is_a<LocalNonpersistent>(element)) kept.push_back(drop_from_node(element, depth));
  }
  return kept;
}

StateDict drop_from_dict(const StateDict& state, size_t& depth) {
  StateDict kept;
  kept.others() = state.others();
  kept.original_keys() = state.original_keys();
  auto& entries = kept.entries();
  for (const auto& [key, node] : state) {
    if (!is_a<LocalNonpersistent>(node)) entries.emplace_back(key, drop_from_node(node, depth));
  }
  return kept;
}

// For each element of the original list, the index of its element in `loaded`, or -1 for a
// LocalNonpersistent element that was dropped.
std::vector<ptrdiff_t> align(const StateList& loaded, const StateList& original, const Path& path) {
  const auto dropped = std::count_if(original.begin(), original.end(), is_a<LocalNonpersistent>);
  const bool complete = loaded.size() == original.size();
  if (!complete && loaded.size() + static_cast<size_t>(dropped) != original.size()) {
    mismatch(path, "expected a list of " +
                       std::to_string(original.size() - static_cast<size_t>(dropped)) +
                       " elements, found " + std::to_string(loaded.size()) + " elements");
  }
  std::vector<ptrdiff_t> positions;
  ptrdiff_t next = 0;
  for (const StateNode& element : original) {
    positions.push_back(!complete && is_a<LocalNonpersistent>(element) ? -1 : next++);
  }
  return positions;
}

// ---- merge_factories ----

class TreeMerger {
 public:
  void merge(StateDict& loaded, const StateDict& original) {
    for (const auto& [key, node] : original) {
      StateNode* found = loaded.find(key);
      if (found == nullptr) continue;
      path_.push_back(key);
      merge(*found, node);
      path_.pop_back();
    }
  }

 private:
  void merge(StateNode& loaded, const StateNode& original) {
    const Level level(depth_);
    if (const auto* factory = original.get_if<ShardedTensorFactory>()) {
      run(loaded, *factory);
    } else if (const auto* dict = original.get_if<StateDict>()) {
      if (auto* loaded_dict = loaded.get_if<StateDict>()) {
        merge(*loaded_dict, *dict);
      } else {
        expect_no_factory(original, "expected a dict");
      }
    } else if (const auto* list = original.get_if<StateList>()) {
      if (auto* loaded_list = loaded.get_if<StateList>()) {
        merge(*loaded_list, *list, original);
      } else {
        expect_no_factory(original, "expected a list");
      }
    }
  }

  void merge(StateList& loaded, const StateList& list, const StateNode& original) {
    size_t depth = 0;
    if (!holds<ShardedTensorFactory>(original, depth)) return;
    const std::vector<ptrdiff_t> positions = align(loaded, list, path_);
    for (size_t i = 0; i < list.size(); ++i) {
      if (positions[i] < 0) continue;
      path_.emplace_back(static_cast<int64_t>(i));
      merge(loaded[static_cast<size_t>(positions[i])], list[i]);
      path_.pop_back();
    }
  }

  static void run(StateNode& loaded, const ShardedTensorFactory& factory) {
    with_key(factory.key, [&] {
      if (!factory.merge) {
        throw Error(ErrorCode::kInvalidArgument, "the factory has no merge function");
      }
      loaded = factory.merge(std::move(loaded));
    });
  }

  void expect_no_factory(const StateNode& original, const char* problem) const {
    size_t depth = 0;
    if (holds<ShardedTensorFactory>(original, depth)) mismatch(path_, problem);
  }

  Path path_;
  size_t depth_ = 0;
};

// ---- restore_nonpersistent ----

StateNode value_of(const LocalNonpersistent& local) {
  return local.value != nullptr ? *local.value : StateNode();
}

class Restorer {
 public:
  StateDict restore(StateDict loaded, const StateDict& original) {
    std::unordered_set<const StateNode*> taken;
    StateDict restored;
    restored.others() = std::move(loaded.others());
    restored.original_keys() = std::move(loaded.original_keys());
    auto& entries = restored.entries();
    for (const auto& [key, node] : original) {
      StateNode* found = loaded.find(key);
      taken.insert(found);
      path_.push_back(key);
      if (auto whole = restore_entry(found, node)) entries.emplace_back(key, std::move(*whole));
      path_.pop_back();
    }
    for (StateDict::Entry& entry : loaded.entries()) {
      if (!taken.contains(&entry.second)) entries.push_back(std::move(entry));
    }
    return restored;
  }

 private:
  // The node for an entry of the original, or nullopt if it was neither loaded nor kept.
  std::optional<StateNode> restore_entry(StateNode* found, const StateNode& original) {
    if (const auto* local = original.get_if<LocalNonpersistent>()) return value_of(*local);
    if (found != nullptr) return restore(std::move(*found), original);
    size_t depth = 0;
    if (!holds<LocalNonpersistent>(original, depth)) return std::nullopt;
    if (is_a<StateDict>(original)) return restore(StateDict(), original);
    return restore(StateList(), original);
  }

  StateNode restore(StateNode loaded, const StateNode& original) {
    const Level level(depth_);
    if (const auto* dict = original.get_if<StateDict>()) {
      if (auto* loaded_dict = loaded.get_if<StateDict>()) {
        return restore(std::move(*loaded_dict), *dict);
      }
      expect_nothing_local(original, "expected a dict");
    } else if (const auto* list = original.get_if<StateList>()) {
      if (auto* loaded_list = loaded.get_if<StateList>()) {
        return restore(std::move(*loaded_list), *list, original);
      }
      expect_nothing_local(original, "expected a list");
    }
    return loaded;
  }

  StateNode restore(StateList loaded, const StateList& list, const StateNode& original) {
    size_t depth = 0;
    if (!holds<LocalNonpersistent>(original, depth)) return loaded;
    const std::vector<ptrdiff_t> positions = align(loaded, list, path_);
    StateList restored;
    restored.reserve(list.size());
    for (size_t i = 0; i < list.size(); ++i) {
      if (const auto* local = list[i].get_if<LocalNonpersistent>()) {
        restored.push_back(value_of(*local));
        continue;
      }
      path_.emplace_back(static_cast<int64_t>(i));
      restored.push_back(restore(std::move(loaded[static_cast<size_t>(positions[i])]), list[i]));
      path_.pop_back();
    }
    return restored;
  }

  void expect_nothing_local(const StateNode& original, const char* problem) const {
    size_t depth = 0;
    if (holds<LocalNonpersistent>(original, depth)) mismatch(path_, problem);
  }

  Path path_;
  size_t depth_ = 0;
};

}  // namespace

bool is_plain(const StateDict& state) {
  size_t depth = 0;
  return is_plain(state, depth);
}

StateDict build_factories(const StateDict& state) {
  size_t depth = 0;
  return build_dict(state, depth);
}

StateDict merge_factories(StateDict loaded, const StateDict& original) {
  TreeMerger().merge(loaded, original);
  return loaded;
}

StateDict drop_nonpersistent(const StateDict& state) {
  size_t depth = 0;
  return drop_from_dict(state, depth);
}

StateDict restore_nonpersistent(StateDict loaded, const StateDict& original) {
  return Restorer().restore(std::move(loaded), original);
}

}  // namespace tilestone
