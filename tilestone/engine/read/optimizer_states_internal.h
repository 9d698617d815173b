// The states of Megatron-Core's distributed optimizer by parameter, whatever the format in which
// they are stored. Here a bucket becomes parameters, for loads and for conversions.
//
// Where a checkpoint stores a tensor for each parameter and state, only keys differ between
// versions. Buckets (dp_reshardable) and objects (dp_zero_gather_scatter) hold flat tensors, and
// only a layout says where a parameter is in them. From layouts follows a second Metadata, in which
// each state is a tensor of its own, "optimizer.state.STATE.KEY", and whose chunks are the boxes in
// the buckets. plan_load() over it finds what a wanted box consists of, with all of its checks.
// Each read of this plan is a range of a flat tensor, which is then read like any stored tensor.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tilestone/base/dtype.h"
#include "tilestone/engine/read/optimizer_layout_internal.h"
#include "tilestone/geometry/strided_copy.h"
#include "tilestone/plan/load_plan.h"
#include "tilestone/state/items.h"
#include "tilestone/state/metadata.h"
#include "tilestone/state/tensor_view.h"
#include "tilestone/state/value.h"

namespace tilestone::engine {

// Gives the tensors of states by parameter the keys of fully_reshardable: without "chained_N.", and
// "param" instead of "fp32_param". Error(kInvalidArgument) if two get the same key.
void rename_states(Metadata& metadata);

// The format in which an optimizer's states are stored: "dp_reshardable", "dp_zero_gather_scatter",
// "fully_reshardable" or "fully_sharded_model_space". `common`: the common state; null: none.
// `place`: the optimizer's key in it. Throws Error(kUnsupported) for another declared format;
// kNotFound if there is no such state; kCorrupt if the keys are not those of the declared format.
std::string optimizer_format(const Metadata& stored, const Value* common, const std::string& place);
bool is_by_parameter(std::string_view format);
// The name under which a program has the optimizer in its common state.
std::string optimizer_place(const std::optional<Value>& common);

// State and model's key of a state that is stored by parameter, and the reverse.
std::optional<std::pair<std::string, std::string>> state_key(std::string_view key);
std::string key_of_state(const std::string& state, const std::string& key);
// A key of a model-parallel rank's optimizer: "chained_0.optimizer.distributed.dp_group_idx_1" and
// what follows its dot. nullopt: another key.
std::optional<std::pair<std::string, std::string>> group_key(std::string_view key);

// Throws Error(kMismatch): a layout is not that of the job that saved. The caller adds the hint.
inline constexpr const char* kLayoutHint =
    "make the layout from the model, the parallel sizes and the bucket size of the job that saved";
[[noreturn]] void fail_layout(const std::string& parameter, const std::string& problem);

struct OptimizerLayouts {
  std::vector<OptimizerLayout> given;  // of the job that saved; empty: those that are stored
  // Of this rank's own optimizers. They are used if no others are known, and if the checkpoint
  // shows no difference. Empty: an error then.
  std::vector<OptimizerLayout> own;
};

// The reads of flat tensors instead of states.
struct StateReads {
  std::vector<TensorItem> items;
  // What is read into temporary memory, and where it goes once it is there.
  struct Scattered {
    TensorView target;
    TensorView memory;  // 1-D
    Dims strides;       // in it
  };
  std::vector<Scattered> scattered;

  // The range of a flat tensor from element `begin` on whose elements, `strides` apart, `target`
  // gets: read into the target, or into memory of its own, which becomes `scattered`.
  Piece range_for(const TensorView& target, int64_t begin, const Dims& strides);
  void finish() const;  // after the read
};

// Borrows the metadata. Thread-safe after construction.
class OptimizerStates {
 public:
  using ReadObject = std::function<Value(const StoredObject&)>;

  // `wanted`: only what holds some of these states is looked at and read. Null: everything; then
  // all buckets must have a layout, and all layouts their buckets and, if the checkpoint holds the
  // model, its tensors. Throws Error(kInvalidArgument) if no layout is known; kMismatch, with the
  // key of the first parameter that does not fit the checkpoint.
  OptimizerStates(const Metadata& stored, ReadObject object, OptimizerLayouts layouts,
                  const std::vector<TensorItem>* wanted);

  // The states by parameter. Only key, dtype, shape and boxes of the chunks mean something.
  const Metadata& by_parameter() const { return by_parameter_; }
  struct Place {
    size_t flat = 0;
    int64_t start = 0;  // of the box in the flat tensor
    Dims strides;
    const LayoutParameter* parameter = nullptr;

    int64_t element_at(const Dims& offset) const;  // in the flat tensor, of an element of the box
  };
  const Place& place(const StoredChunk& chunk) const { return places_[chunk.at.offset]; }

  // As plan_load() over by_parameter(). What no layout describes is Error(kMismatch).
  LoadPlan plan(std::span<const TensorItem> states, bool cast) const;
  // What to read instead of states; other items stay. What objects hold is copied now, and what is
  // padding becomes zero.
  StateReads reads_of(std::vector<TensorItem> wanted, bool cast) const;
  // The common state of the format fully_reshardable, with the param groups of each optimizer of a
  // chain: of this rank's own group, or of one that is read.
  Value common(const std::optional<Value>& stored, const std::string& place) const;

 private:
  // Everything that a model-parallel rank has stored.
  struct StoredGroup {
    std::map<std::string, const StoredTensor*> tensors;  // by the whole key
    std::map<std::string, const StoredObject*> objects;  // by the key behind the prefix
  };
  // A bucket of one state.
  struct Flat {
    std::string state;
    const StoredTensor* stored = nullptr;  // null: the view
    TensorView view;                       // 1-D, in an object
    DType dtype() const { return stored != nullptr ? stored->dtype : view.dtype; }
  };
  using BucketId = std::pair<size_t, size_t>;  // numbers of the buffer and of the bucket
  struct Asked;

  void find_groups();
  void find_layouts(OptimizerLayouts layouts);
  void expect_complete() const;
  void add_layout(const OptimizerLayout& layout, const Asked* asked);
  bool is_wanted(const LayoutParameter& parameter, const LayoutPiece& piece, const Asked* asked);
  void check_model(const LayoutParameter& parameter, const LayoutPiece& piece, bool all) const;
  void add_piece(const LayoutParameter& parameter, const LayoutPiece& piece,
                 std::span<const size_t> flats, const Asked* asked);
  std::span<const size_t> flats_of(const OptimizerLayout& layout, BucketId id);
  void add_tensors(const OptimizerLayout& layout, BucketId id, std::vector<size_t>& found);
  void add_views(const OptimizerLayout& layout, BucketId id, std::vector<size_t>& found);
  const Value& object_of(const OptimizerLayout& layout, const StoredObject& stored);
  Value groups_of(const StoredGroup& group) const;
  const StoredGroup* group_for(std::optional<int64_t> chain) const;

  const Metadata& stored_;
  const ReadObject object_;
  std::map<std::string, StoredGroup> groups_;       // by prefix
  std::map<std::string, OptimizerLayout> layouts_;  // by prefix
  std::vector<OptimizerLayout> own_;
  bool only_own_ = false;                 // layouts_ are own_
  std::map<std::string, Value> objects_;  // that were read, by prefix
  std::vector<Flat> flats_;
  std::map<std::pair<const OptimizerLayout*, BucketId>, std::vector<size_t>> buckets_;
  std::vector<Place> places_;
  std::set<std::pair<std::string, Box>> held_;  // the model's key and box
  std::map<std::string, StoredTensor> by_key_;  // becomes by_parameter_
  std::map<std::string, Dims> shapes_;          // by the model's key
  Metadata by_parameter_;
};

}  // namespace tilestone::engine
