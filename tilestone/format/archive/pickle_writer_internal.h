// Appends pickle opcodes to a buffer. The caller says what to memoise.
#pragma once

#include <cstdint>
#include <string_view>

#include "tilestone/base/bytes.h"
#include "tilestone/base/dtype.h"
#include "tilestone/format/archive/pickle_opcodes_internal.h"
#include "tilestone/geometry/dims.h"
#include "tilestone/state/value.h"

namespace tilestone::archive {

class PickleWriter {
 public:
  // protocol 2 (what torch.load(weights_only=True) reads) or 4
  explicit PickleWriter(int protocol);

  void op(uint8_t opcode) { out_.push_back(static_cast<std::byte>(opcode)); }
  void none() { op(op::kNone); }
  void boolean(bool value) { op(value ? op::kNewTrue : op::kNewFalse); }
  void integer(int64_t value);
  void big_integer(ByteView little_endian);  // two's complement
  void floating(double value);
  void string(std::string_view text);  // Error(kInvalidArgument) beyond 4 GiB
  // As Python writes bytes in protocol 2: text of the same code points, encoded when it is read.
  void bytes(ByteView bytes);
  // Error(kInvalidArgument) on a name that can't stand in a pickle.
  void global(std::string_view module, std::string_view name);
  void int_tuple(const Dims& values);

  // Gives what was pushed last the next memo index.
  uint32_t memoize();
  void get(uint32_t index);

  void reserve(size_t n) { out_.reserve(n); }
  size_t size() const { return out_.size(); }
  Bytes finish() &&;  // with STOP

 private:
  template <typename T>
  void little(T value);

  Bytes out_;
  uint32_t memo_ = 0;
  bool short_strings_;
};

// torch's storage class of a dtype ("FloatStorage"); "" for dtypes that torch keeps in untyped
// storages.
std::string_view storage_class(DType dtype);

// The call that rebuilds a C-contiguous tensor over the record "data/RECORD".
void write_tensor_node(PickleWriter& out, DType dtype, const Dims& shape, std::string_view record,
                       Autograd autograd = {});

}  // namespace tilestone::archive
