#include "tilestone/engine/convert/convert_optimizer_internal.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/geometry/coverage.h"

namespace tilestone::engine {
namespace {

constexpr std::string_view kMains = "optimizer.state.param.";

void expect_disjoint(const OptimizerStates& states) {
  for (const StoredTensor& tensor : states.by_parameter().tensors) {
    std::vector<Box> boxes;
    for (const StoredChunk& chunk : tensor.chunks) boxes.push_back(chunk.box);
    const auto shared = find_overlap(boxes);
    if (!shared) continue;
    throw Error(ErrorCode::kCoverage,
                "two layouts hold the same elements: " + to_string(boxes[shared->first]) + " and " +
                    to_string(boxes[shared->second]))
        .with_key(tensor.key);
  }
}

// ---- The values

// Some elements of a chunk, of the optimizer's parameters and of the model's.
struct Sample {
  const LayoutParameter* parameter;
  TensorItem state;
  TensorItem model;
};

// Up to 256 elements that are not far from one another in the bucket.
Sample sample_of(const StoredChunk& chunk, const OptimizerStates::Place& place,
                 const StoredTensor& state, const StoredTensor& model) {
  constexpr int64_t kElements = 256;
  constexpr int64_t kReach = 1 << 16;  // in the bucket
  Box box{chunk.box.offset, Dims(chunk.box.rank(), 1)};
  if (box.rank() > 0) {
    const int64_t stride = std::max<int64_t>(place.strides.back(), 1);
    box.shape[box.rank() - 1] = std::min({chunk.box.shape.back(), kElements, kReach / stride + 1});
  }
  const auto item = [&](const StoredTensor& stored) {
    TensorItem made;
    made.key = stored.key;
    made.dtype = DType::kFloat32;
    made.global_shape = stored.shape;
    made.pieces.push_back({box, TensorView::allocate(DType::kFloat32, box.shape)});
    return made;
  };
  return {place.parameter, item(state), item(model)};
}

// The main parameters are more precise than the model's, which may be of 8 bits. So only large
// differences of most elements count.
void compare(const Sample& sample) {
  const auto ours = sample.state.pieces[0].data.elements<float>();
  const auto theirs = sample.model.pieces[0].data.elements<float>();
  size_t differing = 0;
  for (size_t i = 0; i < ours.size(); ++i) {
    const float a = ours[i], b = theirs[i];
    const bool close = std::abs(a - b) <= 0.3F * std::max(std::abs(a), std::abs(b)) + 1e-6F;
    differing += close || std::isnan(b) ? 0 : 1;
  }
  if (2 * differing <= ours.size()) return;
  fail_layout(
      sample.parameter->key,
      "where the layout has this parameter, the optimizer's parameters are not the model's: " +
          std::to_string(differing) + " of " + std::to_string(ours.size()) +
          " compared elements of \"" + sample.model.key + "\" differ");
}

void compare(StoredSource& source, std::vector<Sample>& samples) {
  std::vector<TensorItem> items;
  for (Sample& sample : samples) {
    items.push_back(sample.state);
    items.push_back(sample.model);
  }
  source.read(items, true);
  try {
    for (const Sample& sample : samples) compare(sample);
  } catch (Error& error) {
    error.with_hint(kLayoutHint);
    throw;
  }
  samples.clear();
}

// Compares the optimizer's parameters with the model's. A layout that has the sizes of the right
// one, but not its order, is found in this way.
void check_values(StoredSource& source, const OptimizerStates& states) {
  constexpr size_t kBatch = 1000;
  std::vector<Sample> samples;
  for (const StoredTensor& state : states.by_parameter().tensors) {
    if (!state.key.starts_with(kMains)) continue;
    const StoredTensor* const model =
        source.metadata().find_tensor(state.key.substr(kMains.size()));
    const bool is_real =
        model != nullptr && (model->dtype == DType::kFloat32 || model->dtype == DType::kBFloat16 ||
                             model->dtype == DType::kFloat16);
    for (const StoredChunk& chunk : state.chunks) {
      if (is_real) samples.push_back(sample_of(chunk, states.place(chunk), state, *model));
      if (samples.size() == kBatch) compare(source, samples);
    }
  }
  compare(source, samples);
}

// ---- What is written

void replace_entries(ConvertSource& source, const OptimizerStates& states) {
  std::erase_if(source.entries,
                [](const SourceEntry& entry) { return group_key(entry.key()).has_value(); });
  for (const StoredTensor& tensor : states.by_parameter().tensors) {
    source.entries.push_back({&tensor});
  }
  std::stable_sort(source.entries.begin(), source.entries.end(),
                   [](const SourceEntry& a, const SourceEntry& b) {
                     const bool a_object = a.tensor == nullptr, b_object = b.tensor == nullptr;
                     return a_object != b_object ? b_object : a.key() < b.key();
                   });
}

}  // namespace

void make_fully_reshardable(ConvertSource& source, const std::string& layout_file) {
  const std::string place = optimizer_place(source.common);
  const Value* const common = source.common ? &*source.common : nullptr;
  if (is_by_parameter(optimizer_format(source.metadata(), common, place))) {
    throw Error(ErrorCode::kInvalidArgument,
                "the optimizer's states are already stored by parameter, and load into any layout")
        .with_hint("leave out the options --optimizer and --layout");
  }
  const OptimizerStates& states =
      source.stored->unpack_optimizer(optimizer_layouts_in(layout_file));
  expect_disjoint(states);
  check_values(*source.stored, states);
  replace_entries(source, states);
  source.common = states.common(source.common, place);
}

}  // namespace tilestone::engine
