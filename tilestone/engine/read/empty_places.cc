#include "tilestone/engine/read/empty_places_internal.h"

#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/read/key_prefixes_internal.h"
#include "tilestone/engine/read/key_runs_internal.h"
#include "tilestone/engine/read/subtrees_internal.h"

namespace tilestone::engine {
namespace {

using Policy = Differences::Policy;

// ---- A rank's places ----

// The depth of recursion is that of the caller's tree.
class EmptyFinder {
 public:
  explicit EmptyFinder(const LoadOptions& options) {
    for (const Path& path : options.kept_empty) named_.insert(dotted(path));
    for (const auto* paths : {&options.subtrees, &options.unmade}) {
      for (Path path : *paths) {
        for (; !path.empty(); path.pop_back()) named_.insert(dotted(path));
      }
    }
  }

  std::vector<Path> run(const StateDict& wanted) {
    visit(wanted);
    return std::move(found_);
  }

 private:
  void visit(const StateDict& dict) {
    for (const auto& [key, node] : dict.entries()) at(key, node);
  }

  void visit(const StateList& list) {
    for (size_t i = 0; i < list.size(); ++i) at(static_cast<int64_t>(i), list[i]);
  }

  void at(const PathElement& element, const StateNode& node) {
    path_.push_back(element);
    const auto* dict = node.get_if<StateDict>();
    const auto* list = node.get_if<StateList>();
    const auto* value = node.get_if<Value>();
    const bool is_empty_list =
        value != nullptr && value->kind() == Value::Kind::kList && value->items().empty();
    if ((dict != nullptr && dict->empty() && dict->others().empty()) ||
        (list != nullptr && list->empty()) || is_empty_list) {
      if (!named_.contains(dotted(path_))) found_.push_back(path_);
    } else if (dict != nullptr) {
      visit(*dict);
    } else if (list != nullptr) {
      visit(*list);
    }
    path_.pop_back();
  }

  std::set<std::string> named_;
  Path path_;
  std::vector<Path> found_;
};

// ---- Which are filled ----

// Collects the global shapes of sharded tensors.
void add_shapes(const StateNode& node, std::vector<Dims>& shapes) {
  const auto add = [&](const Dims& shape) {
    if (std::find(shapes.begin(), shapes.end(), shape) == shapes.end()) shapes.push_back(shape);
  };
  if (const auto* tensor = node.get_if<ShardedTensor>()) {
    add(tensor->global_shape);
  } else if (const auto* dict = node.get_if<StateDict>()) {
    for (const auto& [key, child] : dict->entries()) add_shapes(child, shapes);
  } else if (const auto* list = node.get_if<StateList>()) {
    for (const StateNode& child : *list) add_shapes(child, shapes);
  }
}

bool is_stored_whole(const StoredTensor& tensor) {
  return numel(tensor.shape) == 0 ||
         std::any_of(tensor.chunks.begin(), tensor.chunks.end(), [&](const StoredChunk& chunk) {
           return chunk.box == Box::whole(tensor.shape);
         });
}

[[noreturn]] void refuse_tensor(const std::string& key) {
  throw Error(ErrorCode::kMismatch,
              "the template has an empty dict under this key, and the checkpoint a tensor")
      .with_key(key)
      .with_hint("request an array of the tensor's dtype and shape, or leave the key out");
}

[[noreturn]] void refuse_unplaced(const std::string& place, const std::vector<std::string>& keys) {
  throw Error(ErrorCode::kMismatch,
              "the template has nothing yet at " + place +
                  ", and the checkpoint has arrays there that are sharded over ranks, so nothing "
                  "says which part this rank needs: " +
                  list_keys(keys))
      .with_key(keys.front())
      .with_reason(Reason::kNotRequested)
      .with_hint(Hint{{"create the state before the load"},
                      {std::string(kHintAtOptimizers)},
                      {"if the parameters are whole on every rank, load into the optimizer itself: "
                       "{\"optim\": optimizer}"},
                      {"", "differences.not_requested", "report", " loads without them"}});
}

}  // namespace

std::vector<Path> empty_places(const StateDict& wanted, const LoadOptions& options) {
  if (!options.fill_empty) return {};
  return EmptyFinder(options).run(wanted);
}

Bytes with_places(ByteView message, const std::vector<Path>& places) {
  ByteWriter writer;
  writer.varint(places.size());
  for (const Path& path : places) writer.string(dotted(path));
  writer.raw(message);
  return std::move(writer).take();
}

std::vector<std::string> take_common_places(std::vector<Bytes>& messages) {
  std::map<std::string, size_t> ranks;  // how many have the place
  for (Bytes& message : messages) {
    ByteReader reader(message, "message with the empty dicts of a rank");
    std::set<std::string> own;
    for (uint64_t left = reader.count(1); left > 0; --left) {
      own.insert(std::string(reader.string()));
    }
    for (const std::string& place : own) ++ranks[place];
    message.erase(message.begin(), message.begin() + static_cast<ptrdiff_t>(reader.offset()));
  }
  std::vector<std::string> common;
  for (const auto& [place, count] : ranks) {
    if (count == messages.size()) common.push_back(place);
  }
  return common;
}

std::vector<Path> filled_places(const StateDict& wanted, const std::vector<Path>& empty,
                                const Metadata& stored, const LoadOptions& options, int ranks) {
  std::vector<Path> filled = options.subtrees;
  if (empty.empty() && options.unmade.empty()) return filled;
  std::unordered_map<std::string, const Path*> places;
  for (const auto* paths : {&empty, &options.unmade}) {
    for (const Path& path : *paths) places.emplace(dotted(path), &path);
  }
  std::vector<Dims> sharded;
  for (const auto& [key, node] : wanted.entries()) add_shapes(node, sharded);
  std::map<std::string, std::vector<std::string>> unplaced;  // keys by place
  for (const StoredTensor& tensor : stored.tensors) {
    any_prefix(tensor.key, tensor.path, [&](std::string_view prefix, size_t elements) {
      const auto place = places.find(std::string(prefix));
      if (place == places.end() || place->second->size() != elements) return false;
      if (elements == tensor.path.size()) refuse_tensor(tensor.key);
      const bool is_state = !tensor.shape.empty() && std::find(sharded.begin(), sharded.end(),
                                                               tensor.shape) != sharded.end();
      if (is_state || (ranks > 1 && !is_stored_whole(tensor))) {
        unplaced[place->first].push_back(tensor.key);
      }
      return true;
    });
  }
  const auto policy = options.differences.not_requested;
  const bool may_leave_out = policy && *policy != Policy::kError;
  if (!unplaced.empty() && !may_leave_out) {
    refuse_unplaced(unplaced.begin()->first, unplaced.begin()->second);
  }
  for (const auto& [place, path] : places) {
    if (!unplaced.contains(place)) filled.push_back(*path);
  }
  return filled;
}

}  // namespace tilestone::engine
