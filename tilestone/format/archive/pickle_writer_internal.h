// Appends pickle opcodes to a buffer. The caller decides what to memoise.
#pragma once

#include <cstdint>
#include <string_view>

#include "tilestone/base/bytes.h"
#include "tilestone/base/dtype.h"
#include "tilestone/format/archive/pickle_opcodes_internal.h"
#include "tilestone/geometry/box.h"
#include "tilestone/state/value.h"

namespace tilestone::archive {

class PickleWriter {
 public:
  // `protocol`: 2, which torch.load(weights_only=True) reads, or 4.
  explicit PickleWriter(int protocol);

  void op(uint8_t opcode) { out_.push_back(static_cast<std::byte>(opcode)); }
  void none() { op(op::kNone); }
  void boolean(bool value) { op(value ? op::kNewTrue : op::kNewFalse); }
  void integer(int64_t value);
  void big_integer(ByteView little_endian);  // two's complement
  void floating(double value);
  void string(std::string_view text);  // Error(kInvalidArgument) beyond 4 GiB
  // Writes bytes as Python does in protocol 2: as text with the same code points and a call that
  // encodes it.
  void bytes(ByteView bytes);
  // Error(kInvalidArgument) for a name that can't be pickled.
  void global(std::string_view module, std::string_view name);
  void int_tuple(const Dims& values);

  // Memoises the object that was pushed last. Returns its memo index.
  uint32_t memoize();
  void get(uint32_t index);

  void reserve(size_t n) { out_.reserve(n); }
  size_t size() const { return out_.size(); }
  Bytes finish() &&;  // appends STOP

 private:
  template <typename T>
  void little(T value);
  void indexed(uint8_t narrow, uint8_t wide, uint32_t index);  // a memo opcode

  Bytes out_;
  uint32_t memo_ = 0;
  bool short_strings_;
};

// Writes the call that rebuilds a C-contiguous tensor from the record "data/RECORD".
void write_tensor_node(PickleWriter& out, DType dtype, const Dims& shape, std::string_view record,
                       Autograd autograd = {});

}  // namespace tilestone::archive
