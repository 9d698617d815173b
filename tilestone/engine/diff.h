// Compares two checkpoints, of any formats, dialects and layouts.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tilestone/base/dtype.h"
#include "tilestone/engine/convert.h"
#include "tilestone/engine/run/location.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/geometry/dims.h"

namespace tilestone {

struct Difference {
  enum class Kind : uint8_t {
    kOnlyInA,
    kOnlyInB,
    kKinds,   // a tensor and an object
    kShapes,  // then the values are not compared
    kDTypes,  // `values` is set if the values differ too
    kValues,  // of tensors with equal dtypes and shapes
    kObjects,
  };
  std::string key;
  Kind kind = Kind::kValues;
  bool values = false;  // the fields of values below are set
  std::string a, b;     // what each has: "float32 [2, 3]", or an object as text
  // Elements whose values differ by more than DiffOptions::atol. NaN equals NaN.
  uint64_t differing = 0;
  uint64_t elements = 0;         // of the tensor
  double max = 0;                // the largest difference; NaN if one of two values is NaN
  double mean = 0;               // of the differences of all elements, without those with NaN
  Dims first;                    // the place of the first differing element
  std::string first_a, first_b;  // its values
};
std::string_view to_string(Difference::Kind kind);  // "only in a", "values", ...

struct DiffOptions {
  std::vector<std::string> keys = {};     // shell-style patterns; empty: all
  std::vector<RenameRule> rename_a = {};  // applied to the keys of `a` before they are compared
  double atol = 0;                        // values that differ by at most this are equal
  Reading reading = {};
  Checks checks = {};
  Resources resources = {};
  ProgressFn progress = nullptr;
  std::shared_ptr<const Interrupt> interrupt = nullptr;
};

struct DiffReport {
  std::vector<Difference> differences;  // by key
  uint64_t equal_tensors = 0;
  uint64_t equal_objects = 0;
  uint64_t bytes = 0;  // of tensors that were compared, of both
  double seconds = 0;
  bool same() const { return differences.empty(); }
};

// Reads each checkpoint once. Memory: 128 MiB and the objects. The common states of two checkpoints
// in Megatron-Core's dialect are compared entry by entry, as "common_state.KEY".
// Throws what Checkpoint::open and reads throw.
DiffReport diff(const Location& a, const Location& b, const DiffOptions& options = {});

}  // namespace tilestone
