#include "tilestone/engine/save_items_internal.h"

#include <set>
#include <string_view>

#include "tilestone/base/error.h"
#include "tilestone/state/content_hash.h"

namespace tilestone::engine {

Items items_of(const StateDict& state, const Dialect& dialect, const Format& format) {
  if (is_plain(state)) return dialect.to_items(state, format);
  return dialect.to_items(drop_nonpersistent(build_factories(state)), format);
}

void check_items(const Items& items, const SaveOptions& options, const Format& format) {
  format.check(items);
  std::set<std::string_view> keys;
  if (!options.tensor_attributes.empty()) {
    for (const TensorItem& item : items.tensors) keys.insert(item.key);
  }
  for (const auto& [key, attributes] : options.tensor_attributes) {
    if (keys.contains(key)) continue;
    throw Error(ErrorCode::kInvalidArgument,
                "attributes are given for a tensor that this rank does not save")
        .with_key(key)
        .with_hint("tensor_attributes are given by the keys of the checkpoint");
  }
  for (const TensorItem& item : items.tensors) {
    for (const Piece& piece : item.pieces) {
      if (piece.data.has_data()) continue;
      throw Error(ErrorCode::kInvalidArgument, "a tensor without data can't be saved")
          .with_key(item.key);
    }
  }
}

std::vector<int> replicate_group_of(const SaveOptions& options, const Format& format, int rank,
                                    int world_size) {
  if (options.replicate == SaveOptions::Replicate::kNone) return {};
  if (format.needs_grid()) {
    throw Error(ErrorCode::kUnsupported,
                "the format " + std::string(format.name()) +
                    " keeps each chunk in a file of its own, so no rank can keep copies in its own")
        .with_hint("save with replicate = \"none\"");
  }
  if (options.replicate_group.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "replicate is \"local\", but there is no replicate_group")
        .with_rank(rank)
        .with_hint("give the ranks whose tensors this rank copies, itself among them");
  }
  return checked_group(rank, world_size, options.replicate_group);
}

void note_contents(const Items& items, const Format& format, LocalSavePlan& plan) {
  for (size_t i = 0; i < items.objects.size(); ++i) {
    if (!items.objects[i].common) continue;
    const Value& value = items.objects[i].value;
    const bool archive = value.kind() == Value::Kind::kPickled && value.as_pickled().archive;
    plan.objects[i].content =
        content_hash(archive ? format.parse_object(value.as_pickled().bytes) : value);
  }
}

}  // namespace tilestone::engine
