#include "tilestone/format/archive/pickle_writer_internal.h"

#include <bit>
#include <cstring>
#include <limits>
#include <string>

#include "tilestone/base/error.h"
#include "tilestone/format/archive/tensor_node_internal.h"

namespace tilestone::archive {

PickleWriter::PickleWriter(int protocol) : short_strings_(protocol >= 4) {
  op(op::kProto);
  op(static_cast<uint8_t>(protocol));
}

template <typename T>
void PickleWriter::little(T value) {
  static_assert(std::endian::native == std::endian::little);
  const size_t at = out_.size();
  out_.resize(at + sizeof(T));
  std::memcpy(out_.data() + at, &value, sizeof(T));
}

void PickleWriter::integer(int64_t value) {
  if (value >= 0 && value <= 0xff) {
    op(op::kBinInt1);
    op(static_cast<uint8_t>(value));
  } else if (value >= 0 && value <= 0xffff) {
    op(op::kBinInt2);
    little(static_cast<uint16_t>(value));
  } else if (value >= std::numeric_limits<int32_t>::min() &&
             value <= std::numeric_limits<int32_t>::max()) {
    op(op::kBinInt);
    little(static_cast<int32_t>(value));
  } else {
    op(op::kLong1);
    op(sizeof(value));
    little(value);
  }
}

void PickleWriter::big_integer(ByteView little_endian) {
  if (little_endian.size() <= 0xff) {
    op(op::kLong1);
    op(static_cast<uint8_t>(little_endian.size()));
  } else if (little_endian.size() <= std::numeric_limits<int32_t>::max()) {
    op(op::kLong4);
    little(static_cast<int32_t>(little_endian.size()));
  } else {
    throw Error(ErrorCode::kInvalidArgument, "an int of more than 2 GiB can't be pickled");
  }
  out_.insert(out_.end(), little_endian.begin(), little_endian.end());
}

void PickleWriter::floating(double value) {
  op(op::kBinFloat);
  little(__builtin_bswap64(std::bit_cast<uint64_t>(value)));
}

void PickleWriter::string(std::string_view text) {
  if (short_strings_ && text.size() <= 0xff) {
    op(op::kShortBinUnicode);
    op(static_cast<uint8_t>(text.size()));
  } else if (text.size() <= 0xffffffff) {
    op(op::kBinUnicode);
    little(static_cast<uint32_t>(text.size()));
  } else {
    throw Error(ErrorCode::kInvalidArgument, "a string of more than 4 GiB can't be saved");
  }
  const ByteView raw = as_bytes(text);
  out_.insert(out_.end(), raw.begin(), raw.end());
}

void PickleWriter::bytes(ByteView bytes) {
  std::string text;
  text.reserve(bytes.size() + bytes.size() / 2);
  for (std::byte byte : bytes) {
    const auto c = std::to_integer<uint8_t>(byte);
    if (c < 0x80) {
      text += static_cast<char>(c);
    } else {
      text += static_cast<char>(0xc0 | c >> 6);
      text += static_cast<char>(0x80 | (c & 0x3f));
    }
  }
  global("_codecs", "encode");
  string(text);
  string("latin1");
  op(op::kTuple2);
  op(op::kReduce);
}

void PickleWriter::global(std::string_view module, std::string_view name) {
  if (module.empty() || name.empty() || module.find('\n') != std::string_view::npos ||
      name.find('\n') != std::string_view::npos) {
    throw Error(ErrorCode::kInvalidArgument, "a class or function named \"" + std::string(module) +
                                                 "." + std::string(name) + "\" can't be pickled");
  }
  op(op::kGlobal);
  for (const std::string_view part : {module, name}) {
    const ByteView raw = as_bytes(part);
    out_.insert(out_.end(), raw.begin(), raw.end());
    op('\n');
  }
}

void PickleWriter::int_tuple(const Dims& values) {
  if (values.empty()) return op(op::kEmptyTuple);
  if (values.size() > 3) op(op::kMark);
  for (int64_t value : values) integer(value);
  constexpr uint8_t kTuples[] = {op::kTuple1, op::kTuple2, op::kTuple3};
  op(values.size() > 3 ? op::kTuple : kTuples[values.size() - 1]);
}

uint32_t PickleWriter::memoize() {
  indexed(op::kBinPut, op::kLongBinPut, memo_);
  return memo_++;
}

void PickleWriter::get(uint32_t index) { indexed(op::kBinGet, op::kLongBinGet, index); }

void PickleWriter::indexed(uint8_t narrow, uint8_t wide, uint32_t index) {
  op(index <= 0xff ? narrow : wide);
  if (index <= 0xff) return op(static_cast<uint8_t>(index));
  little(index);
}

Bytes PickleWriter::finish() && {
  op(op::kStop);
  return std::move(out_);
}

// ---- Tensors ----

namespace {

// Writes two arguments that all of torch's rebuilding functions have: requires_grad, and no hooks.
void write_grad_and_hooks(PickleWriter& out, bool requires_grad) {
  out.boolean(requires_grad);
  out.global("collections", "OrderedDict");
  out.op(op::kEmptyTuple);
  out.op(op::kReduce);
}

}  // namespace

void write_tensor_node(PickleWriter& out, DType dtype, const Dims& shape, std::string_view record,
                       Autograd autograd) {
  if (autograd.parameter) {
    out.global("torch._utils", "_rebuild_parameter");
    out.op(op::kMark);
    write_tensor_node(out, dtype, shape, record);
    write_grad_and_hooks(out, autograd.requires_grad);
    out.op(op::kTuple);
    out.op(op::kReduce);
    return;
  }
  const std::string_view typed = storage_class(dtype);
  const int64_t elements = numel(shape);
  out.global("torch._utils", typed.empty() ? "_rebuild_tensor_v3" : "_rebuild_tensor_v2");
  out.op(op::kMark);
  out.op(op::kMark);
  out.string("storage");
  if (typed.empty()) {
    out.global("torch.storage", "UntypedStorage");
  } else {
    out.global("torch", typed);
  }
  out.string(record);
  out.string("cpu");
  out.integer(typed.empty() ? elements * static_cast<int64_t>(itemsize(dtype)) : elements);
  out.op(op::kTuple);
  out.op(op::kBinPersId);
  out.integer(0);
  out.int_tuple(shape);
  out.int_tuple(contiguous_strides(shape));
  write_grad_and_hooks(out, autograd.requires_grad);
  if (typed.empty()) out.global("torch", to_string(dtype));
  out.op(op::kTuple);
  out.op(op::kReduce);
}

}  // namespace tilestone::archive
