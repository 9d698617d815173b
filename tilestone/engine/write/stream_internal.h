// Bytes on their way into a file: packed into pooled buffers, each handed over when it is full;
// or, of large contiguous tensors in host memory that lie in memory as they will lie in the file
// (see ItemEncoder::tensor), written from where they are. Such memory must not change before the
// file is synced or gone.
#pragma once

#include <mutex>

#include "tilestone/base/buffer_pool.h"
#include "tilestone/base/deadline.h"
#include "tilestone/engine/run/progress_internal.h"
#include "tilestone/format/format.h"
#include "tilestone/state/metadata.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// What the streams of one rank share.
struct StreamContext {
  std::shared_ptr<BufferPool> buffers;
  ProgressMeter* progress = nullptr;
  std::mutex device;  // device memory is read by one thread at a time
  Deadline deadline = Deadline::never();
};

// Used by one thread. Borrows the file and the context.
class FileStream {
 public:
  FileStream(WritableFile& file, StreamContext& context) : file_(file), context_(context) {}

  uint64_t position() const { return position_; }  // bytes written so far
  // Writes the item's padding and segments; the checksums of what was handed over.
  ItemChecksums write(const ItemRecipe& recipe);
  uint32_t write(ByteView bytes) { return literal(bytes, 0); }  // returns their CRC-32
  void finish();  // hands over the last, partly filled buffer

 private:
  MutableByteView room(uint64_t wanted);  // at least one byte, at most `wanted`
  void advance(size_t bytes);
  void zeros(uint64_t count);
  // The literal's bytes with the checksum put in; valid until the next call.
  ByteView with_crc32(const Literal& literal, uint32_t crc);
  uint32_t literal(ByteView bytes, uint32_t seed);
  uint32_t tensor(const TensorView& tensor, uint64_t size);
  uint32_t padded(const TensorView& tensor, const Padding& padding, uint64_t size);
  void check_time() const;
  bool can_keep(const TensorView& tensor, uint64_t size) const;
  uint32_t packed(const TensorView& tensor, uint64_t begin, uint64_t end, uint32_t seed);
  uint32_t kept(ByteView bytes, uint32_t seed);
  uint32_t pack(const TensorView& tensor, uint64_t begin, MutableByteView out, uint32_t seed);

  WritableFile& file_;
  StreamContext& context_;
  Buffer buffer_;
  Bytes patched_;
  uint64_t position_ = 0;
};

}  // namespace tilestone::engine
