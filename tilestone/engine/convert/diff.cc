#include "tilestone/engine/convert/convert.h"

#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <complex>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "tilestone/base/dtype.h"
#include "tilestone/base/error.h"
#include "tilestone/base/natural_order.h"
#include "tilestone/engine/convert/rename_rules_internal.h"
#include "tilestone/engine/convert/stored_source_internal.h"
#include "tilestone/engine/read/convert_internal.h"
#include "tilestone/engine/read/everything_internal.h"
#include "tilestone/engine/run/progress_internal.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/known/known.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone {

std::string_view to_string(Difference::Kind kind) {
  switch (kind) {
    case Difference::Kind::kOnlyInA:
      return "only in a";
    case Difference::Kind::kOnlyInB:
      return "only in b";
    case Difference::Kind::kKinds:
      return "kinds";
    case Difference::Kind::kShapes:
      return "shapes";
    case Difference::Kind::kDTypes:
      return "dtypes";
    case Difference::Kind::kValues:
      return "values";
    case Difference::Kind::kObjects:
      return "objects";
  }
  return "unknown";
}

namespace engine {
namespace {

constexpr int64_t kElementsAtOnce = 1 << 17;  // 1 MiB as float64
constexpr size_t kTextBytes = 200;            // of an object that is quoted

// What a checkpoint has under a key.
struct Side {
  bool is_tensor = false;
  std::string given = {};  // its key in the checkpoint, before renaming
  // A tensor.
  DType dtype = DType::kFloat32;
  Dims shape;
  std::optional<uint32_t> index;  // in the metadata; nullopt: of the common state
  TensorView view;                // its elements, once they can be read
  // An object.
  const StoredObject* object = nullptr;  // null: `value` is the object
  Value value;

  static Side of(const StoredTensor& tensor, uint32_t index) {
    return {.is_tensor = true, .dtype = tensor.dtype, .shape = tensor.shape, .index = index};
  }
  static Side of(const TensorView& tensor) {
    return {.is_tensor = true, .dtype = tensor.dtype, .shape = tensor.shape, .view = tensor};
  }
  static Side of(const StoredObject& object) { return {.object = &object}; }
  static Side of(Value value) { return {.value = std::move(value)}; }

  std::string text() const {
    if (is_tensor) return std::string(to_string(dtype)) + " " + to_string(shape);
    return object != nullptr ? "object" : to_string(value, kTextBytes);
  }
};
struct Natural {
  using is_transparent = void;
  bool operator()(std::string_view a, std::string_view b) const { return natural_less(a, b); }
};
using Sides = std::map<std::string, Side, Natural>;

Dims coordinate_of(const Dims& shape, int64_t element) {
  Dims coordinate(shape.size(), 0);
  for (size_t d = shape.size(); d-- > 0;) {
    coordinate[d] = element % shape[d];
    element /= shape[d];
  }
  return coordinate;
}

template <typename T>
T element(const Bytes& raw, int64_t index) {
  T value;
  std::memcpy(&value, raw.data() + static_cast<size_t>(index) * sizeof(T), sizeof(T));
  return value;
}

// The shortest text that stands for the number, in the dtype's precision.
std::string number_text(double value, DType dtype) {
  const bool is_double = dtype == DType::kFloat64 || dtype == DType::kComplex128;
  return is_double ? fmt::format("{}", value) : fmt::format("{}", static_cast<float>(value));
}

// `value`: the element as complex128.
std::string element_text(DType dtype, const Bytes& raw, int64_t index, std::complex<double> value) {
  switch (dtype) {
    case DType::kBool:
      return value.real() != 0 ? "True" : "False";
    case DType::kInt64:
      return fmt::format("{}", element<int64_t>(raw, index));
    case DType::kUInt64:
      return fmt::format("{}", element<uint64_t>(raw, index));
    case DType::kInt32:
    case DType::kUInt32:
      return fmt::format("{:.0f}", value.real());
    default:
      break;
  }
  const std::string real = number_text(value.real(), dtype);
  if (!is_complex(dtype)) return real;
  return real + (std::signbit(value.imag()) ? "" : "+") + number_text(value.imag(), dtype) + "j";
}

// The difference of two integers of 64 bits, which a float64 does not hold.
template <typename T>
double distance(const Bytes& raw_a, const Bytes& raw_b, int64_t index) {
  const T a = element<T>(raw_a, index), b = element<T>(raw_b, index);
  const auto unsigned_a = static_cast<uint64_t>(a), unsigned_b = static_cast<uint64_t>(b);
  return static_cast<double>(a < b ? unsigned_b - unsigned_a : unsigned_a - unsigned_b);
}

// Compares the elements of two tensors of one shape, part by part.
class Values {
 public:
  Values(const Side& a, const Side& b, double atol, Difference& found)
      : a_(a), b_(b), atol_(atol), found_(found) {}

  void compare(ProgressMeter& progress) {
    const int64_t count = numel(a_.shape);
    found_.elements = static_cast<uint64_t>(count);
    for (int64_t begin = 0; begin < count; begin += kElementsAtOnce) {
      const int64_t size = std::min(kElementsAtOnce, count - begin);
      read(a_, begin, size, raw_a_);
      read(b_, begin, size, raw_b_);
      progress.add(raw_a_.size() + raw_b_.size());
      const bool same_dtype = a_.dtype == b_.dtype;
      if (same_dtype && raw_a_ == raw_b_) continue;
      compare_part(begin, size);
    }
    found_.values = found_.differing > 0;
    if (counted_ > 0) found_.mean = sum_ / static_cast<double>(count);
  }

 private:
  static void read(const Side& side, int64_t begin, int64_t size, Bytes& out) {
    const uint64_t item = itemsize(side.dtype);
    out.resize(static_cast<uint64_t>(size) * item);
    if (size == 0) return;
    if (side.view.device == nullptr) {  // in the common state
      return pack_range(side.view.strided_view(), static_cast<uint64_t>(begin) * item, out);
    }
    const DeviceCopy copy{side.view.device, static_cast<uint64_t>(begin) * item, out};
    copy_now(CopyTo::kHost, {&copy, 1});
  }

  // The elements as float64, or pairs of them for complex numbers.
  static void widen(const Side& side, Bytes& raw, int64_t size,
                    std::vector<std::complex<double>>& out) {
    DType from = side.dtype;
    if (from == DType::kFloat4E2M1FNX2) from = DType::kUInt8;  // pairs, which have no value
    out.resize(static_cast<size_t>(size));
    const uint64_t item = itemsize(from);
    const Dims shape{size};
    convert(StridedView::contiguous(reinterpret_cast<std::byte*>(out.data()), shape, 16),
            DType::kComplex128, StridedView::contiguous(raw.data(), shape, item), from);
  }

  void compare_part(int64_t begin, int64_t size) {
    widen(a_, raw_a_, size, wide_a_);
    widen(b_, raw_b_, size, wide_b_);
    const bool same_dtype = a_.dtype == b_.dtype;
    const uint64_t item = itemsize(a_.dtype);
    for (int64_t i = 0; i < size; ++i) {
      const auto at = static_cast<size_t>(i);
      const bool same_bits = same_dtype && std::memcmp(raw_a_.data() + at * item,
                                                       raw_b_.data() + at * item, item) == 0;
      if (same_bits) continue;
      const std::complex<double> a = wide_a_[at], b = wide_b_[at];
      const bool nan_a = std::isnan(a.real()) || std::isnan(a.imag());
      const bool nan_b = std::isnan(b.real()) || std::isnan(b.imag());
      if (nan_a && nan_b) continue;
      const double by = difference(i, a, b);
      if (by == 0) continue;
      if (!std::isnan(by)) {
        sum_ += by;
        ++counted_;
      }
      if (by <= atol_) continue;
      note(begin + i, i, by);
    }
  }

  // Of the element with this number in the part.
  double difference(int64_t index, std::complex<double> a, std::complex<double> b) const {
    if (a_.dtype == b_.dtype && a_.dtype == DType::kInt64) {
      return distance<int64_t>(raw_a_, raw_b_, index);
    }
    if (a_.dtype == b_.dtype && a_.dtype == DType::kUInt64) {
      return distance<uint64_t>(raw_a_, raw_b_, index);
    }
    return a == b ? 0 : std::abs(a - b);  // two equal infinities differ by 0
  }

  // `element`: its number in the tensor. `index`: in the part.
  void note(int64_t element, int64_t index, double by) {
    if (found_.differing++ == 0) {
      const auto at = static_cast<size_t>(index);
      found_.first = coordinate_of(a_.shape, element);
      found_.first_a = element_text(a_.dtype, raw_a_, index, wide_a_[at]);
      found_.first_b = element_text(b_.dtype, raw_b_, index, wide_b_[at]);
    }
    if (std::isnan(by) || by > found_.max) found_.max = std::isnan(found_.max) ? found_.max : by;
  }

  const Side& a_;
  const Side& b_;
  const double atol_;
  Difference& found_;
  Bytes raw_a_, raw_b_;
  std::vector<std::complex<double>> wide_a_, wide_b_;
  double sum_ = 0;
  uint64_t counted_ = 0;
};

class DiffOfTwo {
 public:
  DiffOfTwo(const Location& a, const Location& b, const DiffOptions& options)
      : options_(options),
        a_(StoredSource::open(a, opening_of(options))),
        b_(StoredSource::open(b, opening_of(options))),
        common_a_(a_->common()),
        common_b_(b_->common()),
        sides_a_(sides_of(*a_, common_b_ ? nullptr : &common_a_, options.rename_a)),
        sides_b_(sides_of(*b_, common_a_ ? nullptr : &common_b_, {})) {
    expect_matches();
    select();
  }

  DiffReport run() {
    make_views();
    ProgressMeter progress(options_.progress, "compare", report_.bytes);
    std::set<std::string_view, Natural> keys;
    for (const auto& [key, side] : sides_a_) keys.insert(key);
    for (const auto& [key, side] : sides_b_) keys.insert(key);
    for (const std::string_view key : keys) {
      const auto a = sides_a_.find(key), b = sides_b_.find(key);
      Difference found;
      found.key = key;
      if (a == sides_a_.end() || b == sides_b_.end()) {
        found.kind = b == sides_b_.end() ? Difference::Kind::kOnlyInA : Difference::Kind::kOnlyInB;
        (b == sides_b_.end() ? found.a : found.b) =
            (b == sides_b_.end() ? a->second : b->second).text();
        report_.differences.push_back(std::move(found));
      } else {
        compare(a->second, b->second, std::move(found), progress);
      }
    }
    compare_common();
    progress.finish();
    report_.seconds = progress.seconds();
    return std::move(report_);
  }

 private:
  bool is_wanted(const std::string& key) const {
    return options_.keys.empty() ||
           std::any_of(options_.keys.begin(), options_.keys.end(),
                       [&](const std::string& pattern) { return matches(pattern, key); });
  }
  static bool matches(const std::string& pattern, const std::string& key) {
    return fnmatch(pattern.c_str(), key.c_str(), 0) == 0;
  }

  // Error(kInvalidArgument) for a pattern that matches no key of either checkpoint.
  void expect_matches() const {
    const CommonEntries common = common_entries();
    const auto any = [](const std::string& pattern, const Sides& sides) {
      return std::any_of(sides.begin(), sides.end(),
                         [&](const auto& named) { return matches(pattern, named.second.given); });
    };
    for (const std::string& pattern : options_.keys) {
      if (any(pattern, sides_a_) || any(pattern, sides_b_)) continue;
      if (std::any_of(common.begin(), common.end(),
                      [&](const auto& named) { return matches(pattern, named.first); })) {
        continue;
      }
      const std::string similar = similar_keys_hint(a_->metadata(), pattern);
      throw Error(ErrorCode::kInvalidArgument,
                  "no key of either checkpoint matches \"" + pattern + "\"")
          .with_hint(similar.empty() ? "`tilestone ls` lists the keys" : similar);
    }
  }

  // Keeps what DiffOptions::keys names in either checkpoint, and its counterpart.
  void select() {
    if (options_.keys.empty()) return;
    std::set<std::string> names;
    for (const Sides* sides : {&sides_a_, &sides_b_}) {
      for (const auto& [name, side] : *sides) {
        if (is_wanted(side.given)) names.insert(name);
      }
    }
    for (Sides* sides : {&sides_a_, &sides_b_}) {
      std::erase_if(*sides, [&](const auto& named) { return !names.contains(named.first); });
    }
  }

  // `common`: null, or the common state, whose leaves are compared with those of a state that is
  // in PyTorch's dialect.
  Sides sides_of(const StoredSource& source, const std::optional<Value>* common,
                 const std::vector<RenameRule>& rename) const {
    const RenameRules rules(rename);
    Sides sides;
    const auto add = [&](const std::string& key, Side side) {
      std::string name = rules.apply(key);
      const bool left_out = name.empty() && !key.empty();  // by a rule
      if (left_out) return;
      side.given = key;
      const auto [at, is_new] = sides.emplace(name, side);
      if (is_new || !is_wanted(key)) return;
      if (!is_wanted(at->second.given)) {
        at->second = std::move(side);
        return;
      }
      throw Error(ErrorCode::kInvalidArgument, "two keys of one checkpoint get the same new key")
          .with_key(name);
    };
    const Metadata& metadata = source.metadata();
    for (uint32_t i = 0; i < metadata.tensors.size(); ++i) {
      add(metadata.tensors[i].key, Side::of(metadata.tensors[i], i));
    }
    for (const StoredObject& object : metadata.objects) add(object.key, Side::of(object));
    for (const Path& path : empty_dicts(metadata)) {
      const std::string key = dotted(path);
      const bool is_key =
          metadata.find_tensor(key) != nullptr || metadata.find_object(key) != nullptr;
      if (!is_key) add(key, Side::of(Value::dict({})));
    }
    if (common != nullptr && *common) add_leaves(**common, metadata, add);
    return sides;
  }

  // The leaves that the common state has once it is saved in PyTorch's dialect.
  template <typename Add>
  static void add_leaves(const Value& common, const Metadata& metadata, const Add& add) {
    Items state;
    state.common = common;
    const auto format = format_named("torch_dist");  // of the new items
    const Items items = pytorch_dialect()->to_items(tree_of(std::move(state)), *format);
    const auto name_of = [&](const std::string& key) {
      const bool is_key =
          metadata.find_tensor(key) != nullptr || metadata.find_object(key) != nullptr;
      return is_key ? "common_state." + key : key;
    };
    for (const TensorItem& item : items.tensors) {
      add(name_of(item.key), Side::of(item.pieces.at(0).data));
    }
    for (const ObjectItem& item : items.objects) add(name_of(item.key), Side::of(item.value));
    for (const auto& [path, keys] : items.dict_keys) {
      if (keys.empty) add(name_of(dotted(path)), Side::of(Value::dict({})));
    }
  }

  // In the order in which the tensors are read.
  void make_views() {
    for (auto& [key, a] : sides_a_) {
      const auto b = sides_b_.find(key);
      if (b == sides_b_.end() || !a.is_tensor || !b->second.is_tensor) continue;
      if (a.shape != b->second.shape) continue;
      if (a.index) a.view = a_->tensor(a_->metadata().tensors[*a.index], a.dtype);
      if (b->second.index)
        b->second.view = b_->tensor(b_->metadata().tensors[*b->second.index], b->second.dtype);
      report_.bytes += a.view.bytes() + b->second.view.bytes();
    }
  }

  void compare(const Side& a, const Side& b, Difference found, ProgressMeter& progress) {
    found.a = a.text();
    found.b = b.text();
    const auto value_of = [](const Side& side, const StoredSource& source) {
      return side.object != nullptr ? source.object(*side.object) : side.value;
    };
    if (!a.is_tensor && !b.is_tensor) {
      return compare(value_of(a, *a_), value_of(b, *b_), std::move(found));
    }
    if (!a.is_tensor || !b.is_tensor) {
      found.kind = Difference::Kind::kKinds;
    } else if (a.shape != b.shape) {
      found.kind = Difference::Kind::kShapes;
    } else {
      const bool same_dtype = a.dtype == b.dtype;
      found.kind = same_dtype ? Difference::Kind::kValues : Difference::Kind::kDTypes;
      Values(a, b, options_.atol, found).compare(progress);
      if (same_dtype && !found.values) {
        ++report_.equal_tensors;
        return;
      }
    }
    report_.differences.push_back(std::move(found));
  }

  void compare(const Value& a, const Value& b, Difference found) {
    if (a == b) {
      ++report_.equal_objects;
      return;
    }
    found.kind = Difference::Kind::kObjects;
    found.a = to_string(a, kTextBytes);
    found.b = to_string(b, kTextBytes);
    report_.differences.push_back(std::move(found));
  }

  // What each has under a key "common_state.KEY"; null: it has no such entry.
  using CommonEntries = std::map<std::string, std::pair<const Value*, const Value*>, Natural>;

  // The wanted entries of the common states of two checkpoints of Megatron-Core's dialect.
  CommonEntries common_entries() const {
    CommonEntries entries;
    if (!common_a_ || !common_b_) return entries;
    const auto add = [&](const Value& common,
                         const Value* std::pair<const Value*, const Value*>::* side) {
      if (common.kind() != Value::Kind::kDict) return;
      for (const auto& [key, value] : common.as_dict()) {
        const std::string name =
            key.kind() == Value::Kind::kString ? key.as_string() : to_string(key);
        if (is_wanted("common_state." + name)) entries["common_state." + name].*side = &value;
      }
    };
    add(*common_a_, &std::pair<const Value*, const Value*>::first);
    add(*common_b_, &std::pair<const Value*, const Value*>::second);
    return entries;
  }

  void compare_common() {
    for (const auto& [key, values] : common_entries()) {
      Difference found;
      found.key = key;
      if (values.first != nullptr && values.second != nullptr) {
        compare(*values.first, *values.second, std::move(found));
        continue;
      }
      const bool in_a = values.first != nullptr;
      found.kind = in_a ? Difference::Kind::kOnlyInA : Difference::Kind::kOnlyInB;
      (in_a ? found.a : found.b) = to_string(in_a ? *values.first : *values.second, kTextBytes);
      report_.differences.push_back(std::move(found));
    }
  }

  const DiffOptions& options_;
  const std::shared_ptr<StoredSource> a_;
  const std::shared_ptr<StoredSource> b_;
  const std::optional<Value> common_a_;  // nullopt: the dialect has none
  const std::optional<Value> common_b_;
  Sides sides_a_;
  Sides sides_b_;
  DiffReport report_;
};

}  // namespace
}  // namespace engine

DiffReport diff(const Location& a, const Location& b, const DiffOptions& options) {
  if (!(options.atol >= 0)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("atol is {}; expected a number, at least 0", options.atol));
  }
  try {
    return engine::DiffOfTwo(a, b, options).run();
  } catch (...) {
    rethrow_cause();
  }
}

}  // namespace tilestone
