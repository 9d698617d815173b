#include "tilestone/engine/read/optimizer_layout_internal.h"

#include <string_view>
#include <utility>

#include "tilestone/base/checked.h"
#include "tilestone/base/dtype.h"
#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/format/json_value_internal.h"
#include "tilestone/storage/mapped_file.h"

namespace tilestone::engine {
namespace {

constexpr const char* kWritersHint =
    "tilestone.megatron.distributed_optimizer.write_layouts makes such files";

[[noreturn]] void wrong(const std::string& problem) {
  throw Error(ErrorCode::kMismatch, "not a layout of a distributed optimizer: " + problem)
      .with_hint(kWritersHint);
}

const Value& field(const Value& dict, std::string_view name) {
  const Value* const found = dict.kind() == Value::Kind::kDict ? dict.find(name) : nullptr;
  if (found == nullptr) wrong("there is no \"" + std::string(name) + "\"");
  return *found;
}

const Value::List& list(const Value& value, std::string_view name) {
  if (value.kind() != Value::Kind::kList && value.kind() != Value::Kind::kTuple) {
    wrong(std::string(name) + " is not a list");
  }
  return value.items();
}

int64_t count(const Value& value, std::string_view name) {
  if (value.kind() != Value::Kind::kInt || value.as_int() < 0) {
    wrong(std::string(name) + " is not a number of elements");
  }
  return value.as_int();
}

std::string text(const Value& value, std::string_view name) {
  if (value.kind() != Value::Kind::kString) wrong(std::string(name) + " is not text");
  return value.as_string();
}

Dims counts(const Value& value, std::string_view name) {
  Dims found;
  for (const Value& each : list(value, name)) found.push_back(count(each, name));
  return found;
}

LayoutPiece piece_of(const Value& plain, int64_t parameter_numel) {
  const Value::List& parts = list(plain, "a box");
  if (parts.size() != 7) wrong("a box has " + std::to_string(parts.size()) + " entries, not 7");
  LayoutPiece piece{.key = text(parts[0], "a box's key"),
                    .global_shape = counts(parts[1], "a shape"),
                    .box = {counts(parts[2], "an offset"), counts(parts[3], "a shape")},
                    .strides = counts(parts[4], "a stride"),
                    .start = count(parts[5], "a start")};
  if (piece.strides.size() != piece.global_shape.size()) {
    wrong("a box of " + piece.key + " has a wrong number of strides");
  }
  check_bounds(piece.box, piece.global_shape);
  numel(piece.global_shape);
  int64_t last = piece.start;
  for (size_t i = 0; i < piece.strides.size() && !piece.box.empty(); ++i) {
    const int64_t reach =
        checked_mul(piece.box.shape[i] - 1, piece.strides[i], "a parameter's strides");
    last = checked_add(last, reach, "a parameter's strides");
  }
  if (!piece.box.empty() && last >= parameter_numel) {
    wrong("a box of " + piece.key + " exceeds its parameter");
  }
  return piece;
}

LayoutParameter parameter_of(const Value& plain) {
  LayoutParameter parameter{.key = text(field(plain, "key"), "a parameter's key"),
                            .numel = count(field(plain, "numel"), "a parameter's size"),
                            .start = count(field(plain, "start"), "a parameter's start"),
                            .pieces = {}};
  checked_add(parameter.start, parameter.numel, "a parameter's end");
  for (const Value& piece : list(field(plain, "pieces"), "\"pieces\"")) {
    parameter.pieces.push_back(piece_of(piece, parameter.numel));
  }
  return parameter;
}

LayoutBucket bucket_of(const Value& plain) {
  LayoutBucket bucket{.numel = count(field(plain, "numel_unpadded"), "a bucket's size"),
                      .parameters = {}};
  if (count(field(plain, "numel"), "a bucket's padded size") < bucket.numel) {
    wrong("a bucket is longer than with its padding");
  }
  int64_t end = 0;
  for (const Value& each : list(field(plain, "parameters"), "\"parameters\"")) {
    bucket.parameters.push_back(parameter_of(each));
    const LayoutParameter& parameter = bucket.parameters.back();
    if (parameter.start < end) wrong(parameter.key + " overlaps another parameter of its bucket");
    end = parameter.end();
    if (end > bucket.numel) wrong(parameter.key + " exceeds its bucket");
  }
  return bucket;
}

LayoutBuffer buffer_of(const Value& plain) {
  LayoutBuffer buffer;
  Value::List dtypes;
  for (const Value& each : list(field(plain, "dtypes"), "\"dtypes\"")) {
    const std::string name = text(each, "a dtype");
    const auto dtype = parse_dtype(name);
    if (!dtype) wrong("unknown dtype " + name);
    dtypes.emplace_back(*dtype);
    buffer.dtype_text += (buffer.dtype_text.empty() ? "(torch." : ", torch.") + name;
  }
  if (dtypes.size() != 2) wrong("a buffer has two dtypes, of parameters and gradients");
  buffer.dtype_text += ")";
  buffer.dtypes = Value::tuple(std::move(dtypes));
  for (const Value& bucket : list(field(plain, "buckets"), "\"buckets\"")) {
    buffer.buckets.push_back(bucket_of(bucket));
  }
  buffer.numel();
  return buffer;
}

}  // namespace

int64_t LayoutBuffer::numel() const {
  int64_t all = 0;
  for (const LayoutBucket& bucket : buckets) all = checked_add(all, bucket.numel, "a buffer");
  return all;
}

std::string OptimizerLayout::prefix() const {
  const std::string chained = chain ? "chained_" + std::to_string(*chain) + "." : "";
  return chained + "optimizer.distributed.dp_group_idx_" + std::to_string(group);
}

std::string OptimizerLayout::bucket_key(size_t buffer, size_t bucket) const {
  return prefix() + ".gbuf_idx_" + std::to_string(buffer) + ".dtype_" + buffers[buffer].dtype_text +
         ".bucket_idx_" + std::to_string(bucket);
}

OptimizerLayout optimizer_layout_of(const Value& plain) {
  if (count(field(plain, "version"), "\"version\"") != 1) wrong("of another version");
  OptimizerLayout layout;
  layout.group = count(field(plain, "group"), "\"group\"");
  const Value& chain = field(plain, "chain");
  if (!chain.is_null()) layout.chain = count(chain, "\"chain\"");
  for (const Value& buffer : list(field(plain, "buffers"), "\"buffers\"")) {
    layout.buffers.push_back(buffer_of(buffer));
  }
  return layout;
}

std::vector<OptimizerLayout> parse_optimizer_layouts(std::string_view json) {
  const Value plain = value_of_json(json, "the layout of an optimizer");
  std::vector<OptimizerLayout> layouts;
  for (const Value& each : list(field(plain, "optimizer_layouts"), "\"optimizer_layouts\"")) {
    layouts.push_back(optimizer_layout_of(each));
  }
  return layouts;
}

std::vector<OptimizerLayout> optimizer_layouts_in(const std::string& path) {
  if (path.empty()) return {};
  return with_file(path,
                   [&] { return parse_optimizer_layouts(as_text(MappedFile(path).bytes())); });
}

}  // namespace tilestone::engine
