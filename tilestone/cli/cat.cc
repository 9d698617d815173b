// tilestone cat: the values of a tensor, of a slice of one, or of an object.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstring>
#include <nlohmann/json.hpp>

#include "tilestone/base/natural_order.h"
#include "tilestone/cli/commands.h"
#include "tilestone/cli/npy.h"
#include "tilestone/cli/opened.h"
#include "tilestone/cli/output.h"
#include "tilestone/cli/run.h"
#include "tilestone/cli/slice.h"

namespace tilestone::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kSummaryAbove = 1000;  // elements
constexpr int64_t kEdge = 3;             // elements shown at each end of a summarised dim

// The type in which a dtype's elements are printed: one that holds its values exactly.
DType printed_as(DType dtype) {
  switch (dtype) {
    case DType::kBool:
    case DType::kUInt64:
    case DType::kFloat64:
    case DType::kComplex128:
      return dtype;
    case DType::kComplex32:
    case DType::kComplex64:
      return DType::kComplex64;
    case DType::kFloat4E2M1FNX2:  // pairs, which have no value
      return DType::kUInt8;
    default:
      return dtype <= DType::kInt64 ? DType::kInt64 : DType::kFloat32;
  }
}

// Reads a box of a tensor and converts it, with a template load.
TensorView read_converted(const CatOptions& options, const StoredTensor& tensor, const Box& box,
                          DType dtype) {
  StateDict wanted;
  wanted[tensor.key] = ShardedTensor::from_box(
      tensor.key, TensorView::without_data(dtype, box.shape), tensor.shape, box);
  LoadOptions load_options;
  load_options.cast = true;
  const StateDict loaded =
      load(wanted, location_of(options.path, options.follow_links), load_options);
  return loaded.find(tensor.key)->get_if<ShardedTensor>()->data;
}

template <typename T>
T element(const TensorView& tensor, int64_t index) {
  T value;
  std::memcpy(&value, tensor.data + static_cast<uint64_t>(index) * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
std::string complex_text(std::complex<T> value) {
  return fmt::format("{}{}{}j", value.real(), std::signbit(value.imag()) ? "" : "+", value.imag());
}

std::string element_text(const TensorView& t, int64_t i) {
  switch (t.dtype) {
    case DType::kBool:
      return element<uint8_t>(t, i) != 0 ? "True" : "False";
    case DType::kUInt8:
      return fmt::format("{}", element<uint8_t>(t, i));
    case DType::kUInt64:
      return fmt::format("{}", element<uint64_t>(t, i));
    case DType::kInt64:
      return fmt::format("{}", element<int64_t>(t, i));
    case DType::kFloat32:
      return fmt::format("{}", element<float>(t, i));
    case DType::kFloat64:
      return fmt::format("{}", element<double>(t, i));
    case DType::kComplex64:
      return complex_text(element<std::complex<float>>(t, i));
    case DType::kComplex128:
      return complex_text(element<std::complex<double>>(t, i));
    default:
      throw Error(ErrorCode::kInternal, "an element of a dtype that is not printed");
  }
}

// Prints nested brackets, as NumPy does. `summarise`: dims longer than 2 * kEdge show only their
// ends.
void print_dim(std::string& out, const TensorView& t, size_t dim, int64_t first, int64_t stride,
               bool summarise) {
  if (dim == t.shape.size()) {
    out += element_text(t, first);
    return;
  }
  const int64_t size = t.shape[dim];
  const int64_t inner = size > 0 ? stride / size : 0;
  const bool last = dim + 1 == t.shape.size();
  out += '[';
  for (int64_t i = 0; i < size; ++i) {
    if (i > 0) out += last ? ", " : ",\n" + std::string(dim + 1, ' ');
    if (summarise && size > 2 * kEdge && i == kEdge) {
      out += "...";
      i = size - kEdge - 1;
      continue;
    }
    print_dim(out, t, dim + 1, first + i * inner, inner, summarise);
  }
  out += ']';
}

Json json_element(const TensorView& t, int64_t i) {
  switch (t.dtype) {
    case DType::kBool:
      return element<uint8_t>(t, i) != 0;
    case DType::kUInt64:
      return element<uint64_t>(t, i);
    case DType::kFloat32:
    case DType::kFloat64: {
      const double value = t.dtype == DType::kFloat32 ? static_cast<double>(element<float>(t, i))
                                                      : element<double>(t, i);
      if (!std::isfinite(value)) return element_text(t, i);  // JSON has no NaN
      return value;
    }
    case DType::kComplex64:
    case DType::kComplex128:
      return element_text(t, i);
    default:
      return Json::parse(element_text(t, i));
  }
}

Json json_values(const TensorView& t, size_t dim, int64_t first, int64_t stride) {
  if (dim == t.shape.size()) return json_element(t, first);
  Json out = Json::array();
  const int64_t inner = t.shape[dim] > 0 ? stride / t.shape[dim] : 0;
  for (int64_t i = 0; i < t.shape[dim]; ++i) {
    out.push_back(json_values(t, dim + 1, first + i * inner, inner));
  }
  return out;
}

int cat_npy(const Checkpoint& checkpoint, const StoredTensor& tensor, const Box& box,
            const std::string& path) {
  const TensorView data = checkpoint.read(tensor.key, box);
  write_npy(path, data);
  fmt::print(stderr, "{} {} written to {}{}\n", to_string(data.dtype), shape_text(data.shape), path,
             npy_has(data.dtype) ? "" : " as raw bytes (NumPy lacks the type)");
  return kOk;
}

int cat_tensor(const Checkpoint& checkpoint, const StoredTensor& tensor,
               const CatOptions& options) {
  const Box box = parse_slice(options.slice, tensor.shape);
  if (!options.npy.empty()) return cat_npy(checkpoint, tensor, box, options.npy);
  const TensorView data = read_converted(options, tensor, box, printed_as(tensor.dtype));
  const int64_t count = numel(box.shape);
  if (options.json) {
    Json out = {{"key", tensor.key},
                {"dtype", to_string(tensor.dtype)},
                {"shape", box.shape.span()},
                {"offset", box.offset.span()}};
    out["values"] = json_values(data, 0, 0, count);
    print_json(out, -1);
    return kOk;
  }
  std::string text;
  print_dim(text, data, 0, 0, count, count > kSummaryAbove && !options.all);
  fmt::print("{}\n{} {}\n", text, to_string(tensor.dtype), shape_text(box.shape));
  return kOk;
}

// The key that Megatron-Core reserves for the common state.
constexpr std::string_view kCommonKey = "common_state";

Value read_common(const Checkpoint& checkpoint) {
  if (auto common = checkpoint.common()) return *std::move(common);
  throw Error(ErrorCode::kInvalidArgument, "the checkpoint has no common state")
      .with_hint("only Megatron-Core's dialect has one; the dialect of this checkpoint is " +
                 std::string(checkpoint.dialect_name()));
}

// Whether the common state is wanted. Its key is not the key of an object.
bool is_common(const Checkpoint& checkpoint, const CatOptions& options) {
  return options.common || (options.key == kCommonKey && checkpoint.has_common());
}

// ---- All keys below a prefix

constexpr int64_t kShownElements = 16;  // larger tensors are only described

// The keys that begin with the prefix and a separator, in natural order.
std::vector<std::string> keys_below(const Checkpoint& checkpoint, std::string prefix) {
  while (prefix.ends_with('.') || prefix.ends_with('/')) prefix.pop_back();
  std::vector<std::string> keys = checkpoint.keys();
  std::erase_if(keys, [&](const std::string& key) {
    const bool is_below = key.size() > prefix.size() && key.starts_with(prefix) &&
                          (key[prefix.size()] == '.' || key[prefix.size()] == '/');
    return !is_below;
  });
  std::sort(keys.begin(), keys.end(),
            [](const std::string& a, const std::string& b) { return natural_less(a, b); });
  return keys;
}

int cat_below(const Checkpoint& checkpoint, const std::vector<std::string>& keys,
              const CatOptions& options) {
  if (!options.slice.empty() || !options.npy.empty()) {
    throw Error(ErrorCode::kInvalidArgument, "--slice and --npy need the key of one tensor")
        .with_key(options.key);
  }
  Json out = {{"key", options.key}, {"entries", Json::object()}};
  for (const std::string& key : keys) {
    const StoredTensor* tensor = checkpoint.metadata().find_tensor(key);
    if (tensor == nullptr) {
      const Value value = checkpoint.read_object(key);
      out["entries"][key] = json_value(value);
      if (!options.json) {
        fmt::print("{}: {}\n", key_text(key), to_string(value, options.all ? SIZE_MAX : 4096));
      }
      continue;
    }
    Json entry = {{"dtype", to_string(tensor->dtype)}, {"shape", tensor->shape.span()}};
    std::string text = fmt::format("{} {}", to_string(tensor->dtype), shape_text(tensor->shape));
    const int64_t count = numel(tensor->shape);
    if (count <= kShownElements || options.all) {
      const TensorView data =
          read_converted(options, *tensor, Box::whole(tensor->shape), printed_as(tensor->dtype));
      entry["values"] = json_values(data, 0, 0, count);
      text += " " + entry["values"].dump(-1, ' ', false, Json::error_handler_t::replace);
    }
    out["entries"][key] = std::move(entry);
    if (!options.json) fmt::print("{}: {}\n", printable(key), text);
  }
  if (options.json) print_json(out, -1);
  return kOk;
}

int cat_object(const Checkpoint& checkpoint, const CatOptions& options) {
  const bool common = is_common(checkpoint, options);
  const Value value = common ? read_common(checkpoint) : checkpoint.read_object(options.key);
  if (!options.slice.empty() || !options.npy.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "--slice and --npy are only for tensors, but this is an object")
        .with_key(options.key);
  }
  const std::string text = to_string(value, options.all ? SIZE_MAX : 65536);
  if (options.json) {
    const Json out = {{"key", common ? kCommonKey : options.key},
                      {"kind", to_string(value.kind())},
                      {"value", json_value(value)},
                      {"repr", text}};
    print_json(out, -1);
  } else {
    fmt::print("{}\n", text);
  }
  return kOk;
}

}  // namespace

int cat(const CatOptions& given) {
  const Checkpoint checkpoint = Checkpoint::open(location_of(given.path, given.follow_links));
  CatOptions options = given;
  options.key = key_named(checkpoint, given.key);
  const StoredTensor* tensor = checkpoint.metadata().find_tensor(options.key);
  if (tensor != nullptr && !options.common) {
    return cat_tensor(checkpoint, *tensor, options);
  }
  if (!is_common(checkpoint, options) &&
      checkpoint.metadata().find_object(options.key) == nullptr) {
    const std::vector<std::string> below = keys_below(checkpoint, options.key);
    if (below.empty()) refuse_key(checkpoint, options.key);
    return cat_below(checkpoint, below, options);
  }
  return cat_object(checkpoint, options);
}

}  // namespace tilestone::cli
