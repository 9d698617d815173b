#include "tilestone/engine/save_items_internal.h"

#include <set>
#include <string_view>

#include "tilestone/base/error.h"
#include "tilestone/state/content_hash.h"

namespace tilestone::engine {

namespace {

void note_content(const ObjectItem& item, const Format& format, PlanObject& object) {
  if (object.content != 0) return;
  const Value& value = item.value;
  const bool archive = value.kind() == Value::Kind::kPickled && value.as_pickled().archive;
  object.content = content_hash(archive ? format.parse_object(value.as_pickled().bytes) : value);
}

}  // namespace

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
                "tensor_attributes names a tensor that this rank does not save")
        .with_key(key)
        .with_hint("use the tensor's key in the checkpoint");
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
                    " stores each chunk in its own file, so a rank has no data file for copies")
        .with_hint("save with replicate = \"none\"");
  }
  if (options.replicate_group.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "replicate is \"local\", but there is no replicate_group")
        .with_rank(rank)
        .with_hint("list the ranks whose tensors this rank copies, including this rank");
  }
  return checked_group(rank, world_size, options.replicate_group);
}

ReplicaNames replicas_to_name(const Items& items, const SaveOptions& options,
                              const Dialect& dialect, const Format& format) {
  if (!options.tp_replica_names) return {};
  if (dialect.read_as() == megatron_dialect()->name() && !format.has_fixed_names()) {
    return replicas_among(items);
  }
  throw Error(
      ErrorCode::kUnsupported,
      "tp_replica_names needs Megatron-Core's dialect and the format torch_dist, but this save "
      "has the format " +
          std::string(format.name()) + " and the dialect " + std::string(dialect.name()))
      .with_hint("save with tp_replica_names = false");
}

void note_contents(const Items& items, const Format& format, LocalSavePlan& plan) {
  for (size_t i = 0; i < items.objects.size(); ++i) {
    if (items.objects[i].common) note_content(items.objects[i], format, plan.objects[i]);
  }
}

void note_contents_of_copied(const Items& items, const Format& format, const Dialect& dialect,
                             LocalSavePlan& plan) {
  for (size_t i = 0; i < items.objects.size(); ++i) {
    if (items.objects[i].key == dialect.common_object()) continue;
    note_content(items.objects[i], format, plan.objects[i]);
  }
}

CopyCost settle_copies(const Items& items, const Format& format, const SaveOptions& options,
                       LocalSavePlan& plan, Assignment& assignment) {
  const auto encoder = format.encoder();
  for (const uint32_t i : assignment.object_copies) {
    plan.objects.at(i).bytes = encoder->object(items.objects.at(i), 0).length;
  }
  const uint64_t bytes = limit_copies(plan, options.max_copy_bytes, assignment);
  return {assignment.copies.size() + assignment.object_copies.size(), bytes};
}

}  // namespace tilestone::engine
