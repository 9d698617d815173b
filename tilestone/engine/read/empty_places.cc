#include "tilestone/engine/read/empty_places_internal.h"

#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "tilestone/base/both_ways.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/read/key_prefixes_internal.h"
#include "tilestone/engine/read/key_runs_internal.h"
#include "tilestone/engine/read/subtrees_internal.h"
#include "tilestone/state/node_walk.h"

namespace tilestone::engine {
namespace {

using Policy = Differences::Policy;

bool is_empty(const StateNode& node) {
  const auto* dict = node.get_if<StateDict>();
  const auto* list = node.get_if<StateList>();
  return (dict != nullptr && dict->empty() && dict->others().empty()) ||
         (list != nullptr && list->empty()) || is_empty_list(node);
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
  std::set<std::string> named;
  for (const Path& path : options.kept_empty) named.insert(dotted(path));
  for (const auto* paths : {&options.subtrees, &options.unmade}) {
    for (Path path : *paths) {
      for (; !path.empty(); path.pop_back()) named.insert(dotted(path));
    }
  }
  std::vector<Path> found;
  for_each_node(wanted, [&](const StateNode& node, const Path& path) {
    if (is_empty(node) && !named.contains(dotted(path))) found.push_back(path);
  });
  return found;
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
    both::texts(reader, own);
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
  for_each_node(wanted, [&](const StateNode& node, const Path&) {
    const auto* tensor = node.get_if<ShardedTensor>();
    if (tensor == nullptr || std::ranges::count(sharded, tensor->global_shape) > 0) return;
    sharded.push_back(tensor->global_shape);
  });
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
