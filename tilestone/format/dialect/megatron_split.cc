// Takes a tree apart as Megatron-Core's extract_matching_values does. Everything that is not a
// wrapped entity keeps its place in the common state. A container that has nothing left is removed;
// one that was empty before is kept. In a list, the remaining elements move together.
#include <optional>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/format/archive/torch_archive.h"
#include "tilestone/format/dialect/leaves_internal.h"
#include "tilestone/format/dialect/megatron_internal.h"

namespace tilestone::dialect {
namespace {

using Common = std::optional<Value>;  // nullopt: no part of the node is in the common state

Value key_value(const PathElement& key) {
  return std::visit([](const auto& element) { return Value(element); }, key);
}

// Makes a value that can be part of another one: a value that Python has pickled is parsed.
Value embedded(const Value& value) {
  if (value.kind() != Value::Kind::kPickled) return value;
  const Pickled& pickled = value.as_pickled();
  return pickled.archive ? read_torch_archive(pickled.bytes) : read_pickle(pickled.bytes);
}

TensorView in_host_memory(const TensorView& tensor) {
  if (tensor.device == nullptr) return tensor;
  TensorView copy = TensorView::allocate(tensor.dtype, tensor.shape);
  const DeviceCopy whole = tensor.device_copy({copy.data, copy.bytes()});
  if (copy.bytes() > 0) copy_now(CopyTo::kHost, {&whole, 1});
  return copy;
}

class Splitter {
 public:
  explicit Splitter(const Format& format) : lists_objects_(lists_objects(format)) {}

  // Ignores the remaining common part, which can only be empty containers.
  Items run_shards(const StateDict& state) {
    shards_only_ = true;
    part(state);
    return std::move(items_);
  }

  Items run(const StateDict& state) {
    const Common common = part(state);
    items_.common = common ? *common : Value::dict({});
    check_value(*items_.common, std::string(kCommonKey));
    if (lists_objects_) {
      ObjectItem item;
      item.key = kCommonObject;
      item.value = as_object(*items_.common);
      item.common = true;
      items_.objects.push_back(std::move(item));
    }
    return std::move(items_);
  }

 private:
  Common part(const StateNode& node) {
    return std::visit([&](const auto& content) { return part(content); }, node.variant());
  }
  Common part(const StateDict& dict) {
    Value::Dict kept;
    for (const auto& [key, node] : dict.entries()) {
      path_.push_back(key);
      if (Common common = part(node)) kept.emplace_back(key_value(key), *std::move(common));
      path_.pop_back();
    }
    for (const auto& [key, value] : dict.others()) {
      path_.push_back(key_text(key));
      kept.emplace_back(key, *part(value));
      path_.pop_back();
    }
    if (kept.empty() && !dict.empty()) return std::nullopt;
    return Value::dict(std::move(kept));
  }
  Common part(const StateList& list) {
    Value::List kept;
    for (size_t i = 0; i < list.size(); ++i) {
      path_.emplace_back(static_cast<int64_t>(i));
      if (Common common = part(list[i])) kept.push_back(*std::move(common));
      path_.pop_back();
    }
    if (kept.empty() && !list.empty()) return std::nullopt;
    return Value::list(std::move(kept));
  }
  Common part(const Value& value) {
    expect_common_state();
    return checked(value, dotted(path_));
  }
  Common part(const TensorView& tensor) {
    expect_common_state();
    if (tensor.has_data()) return Value(in_host_memory(tensor));
    throw Error(ErrorCode::kInvalidArgument, "a tensor without data can't be saved")
        .with_key(dotted(path_));
  }
  Common part(const ShardedTensor& tensor) {
    check_key(tensor.key);
    claims_.claim(tensor.key, KeyClaims::Owner::kShardedTensor, path_);
    items_.tensors.push_back(item_of(tensor));
    return std::nullopt;
  }
  Common part(const ShardedObject& object) {
    ObjectItem item = item_of(object);
    if (!shards_only_ || item.key != kCommonObject) check_key(object.key);
    claims_.claim(item.key, KeyClaims::Owner::kShardedObject, path_);
    item.value = checked(item.value, item.key);
    if (lists_objects_) item.value = Value::list({std::move(item.value)});
    items_.objects.push_back(std::move(item));
    return std::nullopt;
  }
  Common part(const ShardedTensorFactory&) { refuse_unbuilt(path_, "factory"); }
  Common part(const LocalNonpersistent&) { refuse_unbuilt(path_, "non-persistent value"); }

  static Value checked(const Value& value, const std::string& key) {
    check_value(value, key);
    return with_key(key, [&] {
      Value inner = embedded(value);
      if (inner.kind() != value.kind()) check_value(inner, key);
      return inner;
    });
  }

  void expect_common_state() const {
    if (!shards_only_) return;
    throw Error(ErrorCode::kInvalidArgument,
                "the dialect megatron_shards saves only wrapped entities")
        .with_key(dotted(path_))
        .with_hint("wrap the value in a ShardedTensor or ShardedObject");
  }

  void check_key(const std::string& key) const {
    if (key != kCommonKey && key != kCommonObject) return;
    throw Error(ErrorCode::kInvalidArgument,
                "a sharded entity uses a key that Megatron-Core reserves for the common state")
        .with_key(key)
        .with_hint("give the entity at " + dotted(path_) + " another key");
  }

  const bool lists_objects_;
  bool shards_only_ = false;  // no common state is allowed
  Path path_;
  Items items_;
  KeyClaims claims_;
};

}  // namespace

bool lists_objects(const Format& format) { return format.name() == "torch_dist"; }

Items split(const StateDict& state, const Format& format) { return Splitter(format).run(state); }

Items split_shards(const StateDict& state, const Format& format) {
  return Splitter(format).run_shards(state);
}

}  // namespace tilestone::dialect
