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

// Whether the subtree contains a node of one of the types. Stops at the first one.
template <typename... Types>
bool holds(const StateNode& node, size_t& depth) {
  if ((is_a<Types>(node) || ...)) return true;
  const auto below = [&](const StateNode& child) { return holds<Types...>(child, depth); };
  const auto* dict = node.get_if<StateDict>();
  const auto* list = node.get_if<StateList>();
  if (dict == nullptr && list == nullptr) return false;
  const Level level(depth);
  return list != nullptr ? std::ranges::any_of(*list, below)
                         : std::ranges::any_of(*dict, below, &StateDict::Entry::second);
}

[[noreturn]] void mismatch(const Path& path, const std::string& problem) {
  throw Error(ErrorCode::kMismatch,
              "the loaded state does not have the template's structure: " + problem)
      .with_key(dotted(path));
}

// ---- build_factories, drop_nonpersistent ----

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

// A copy of the tree with replace(leaf), an optional node, in the place of each node that is
// neither a dict nor a list.
template <typename Replace>
StateDict copied(const StateDict& state, const Replace& replace, size_t& depth);

template <typename Replace>
std::optional<StateNode> copied(const StateNode& node, const Replace& replace, size_t& depth) {
  const Level level(depth);
  if (const auto* dict = node.get_if<StateDict>()) return copied(*dict, replace, depth);
  const auto* list = node.get_if<StateList>();
  if (list == nullptr) return replace(node);
  StateList made;
  made.reserve(list->size());
  for (const StateNode& element : *list) {
    if (auto copy = copied(element, replace, depth)) made.push_back(*std::move(copy));
  }
  return made;
}

template <typename Replace>
StateDict copied(const StateDict& state, const Replace& replace, size_t& depth) {
  StateDict made;
  made.others() = state.others();
  made.original_keys() = state.original_keys();
  auto& entries = made.entries();
  entries.reserve(state.size());
  for (const auto& [key, node] : state) {
    if (auto copy = copied(node, replace, depth)) entries.emplace_back(key, *std::move(copy));
  }
  return made;
}

// ---- merge_factories, restore_nonpersistent ----

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

StateNode merged(StateNode loaded, const ShardedTensorFactory& factory) {
  return with_key(factory.key, [&] {
    if (!factory.merge) {
      throw Error(ErrorCode::kInvalidArgument, "the factory has no merge function");
    }
    return factory.merge(std::move(loaded));
  });
}

// Walks a loaded tree and its original together. In the place of each original node of type Leaf
// comes put(found, leaf), an optional node; `found`: what was loaded there, or null.
template <typename Leaf, typename Put>
class Together {
 public:
  explicit Together(const Put& put) : put_(put) {}

  StateDict dict(StateDict loaded, const StateDict& original) {
    std::unordered_set<const StateNode*> taken;
    StateDict made;
    made.others() = std::move(loaded.others());
    made.original_keys() = std::move(loaded.original_keys());
    auto& entries = made.entries();
    for (const auto& [key, node] : original) {
      StateNode* found = loaded.find(key);
      taken.insert(found);
      path_.push_back(key);
      if (auto whole = entry(found, node)) entries.emplace_back(key, *std::move(whole));
      path_.pop_back();
    }
    for (StateDict::Entry& entry : loaded.entries()) {
      if (!taken.contains(&entry.second)) entries.push_back(std::move(entry));
    }
    return made;
  }

 private:
  // The node for an entry of the original, or nullopt if it was not loaded and nothing is put
  // there.
  std::optional<StateNode> entry(StateNode* found, const StateNode& original) {
    if (const auto* leaf = original.get_if<Leaf>()) return put_(found, *leaf);
    if (found != nullptr) return node(std::move(*found), original);
    // A value that stays on this rank is put back; a factory has nothing to merge.
    if (!std::is_same_v<Leaf, LocalNonpersistent> || !holds_leaf(original)) return std::nullopt;
    if (is_a<StateDict>(original)) return node(StateDict(), original);
    return node(StateList(), original);
  }

  StateNode node(StateNode loaded, const StateNode& original) {
    const Level level(depth_);
    if (const auto* of = original.get_if<StateDict>()) {
      if (auto* found = loaded.get_if<StateDict>()) return dict(std::move(*found), *of);
    } else if (const auto* of_list = original.get_if<StateList>()) {
      if (auto* found = loaded.get_if<StateList>())
        return list(std::move(*found), *of_list, original);
    }
    if (holds_leaf(original)) {
      mismatch(path_, is_a<StateDict>(original) ? "expected a dict" : "expected a list");
    }
    return loaded;
  }

  StateNode list(StateList loaded, const StateList& of, const StateNode& original) {
    if (!holds_leaf(original)) return loaded;
    const std::vector<ptrdiff_t> positions = align(loaded, of, path_);
    StateList made;
    made.reserve(of.size());
    for (size_t i = 0; i < of.size(); ++i) {
      StateNode* found = positions[i] < 0 ? nullptr : &loaded[static_cast<size_t>(positions[i])];
      path_.emplace_back(static_cast<int64_t>(i));
      if (auto whole = entry(found, of[i])) made.push_back(*std::move(whole));
      path_.pop_back();
    }
    return made;
  }

  static bool holds_leaf(const StateNode& original) {
    size_t depth = 0;
    return holds<Leaf>(original, depth);
  }

  const Put& put_;
  Path path_;
  size_t depth_ = 0;
};

}  // namespace

bool is_plain(const StateDict& state) {
  size_t depth = 0;
  return std::ranges::none_of(state, [&](const StateDict::Entry& entry) {
    return holds<ShardedTensorFactory, LocalNonpersistent>(entry.second, depth);
  });
}

StateDict build_factories(const StateDict& state) {
  size_t depth = 0;
  const auto built = [](const StateNode& node) -> std::optional<StateNode> {
    const auto* factory = node.get_if<ShardedTensorFactory>();
    return factory != nullptr ? run_factory(*factory) : node;
  };
  return copied(state, built, depth);
}

StateDict merge_factories(StateDict loaded, const StateDict& original) {
  const auto put = [](StateNode* found, const ShardedTensorFactory& factory) {
    return found == nullptr ? std::nullopt : std::optional(merged(std::move(*found), factory));
  };
  return Together<ShardedTensorFactory, decltype(put)>(put).dict(std::move(loaded), original);
}

StateDict drop_nonpersistent(const StateDict& state) {
  size_t depth = 0;
  const auto kept = [](const StateNode& node) {
    return is_a<LocalNonpersistent>(node) ? std::nullopt : std::optional(node);
  };
  return copied(state, kept, depth);
}

StateDict restore_nonpersistent(StateDict loaded, const StateDict& original) {
  const auto put = [](StateNode*, const LocalNonpersistent& local) {
    return std::optional(local.value != nullptr ? *local.value : StateNode());
  };
  return Together<LocalNonpersistent, decltype(put)>(put).dict(std::move(loaded), original);
}

}  // namespace tilestone
