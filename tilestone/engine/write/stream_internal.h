// Streams bytes into a file. Most bytes are packed into pooled buffers, and each buffer is handed
// over when it is full. Large contiguous tensors in host memory are written directly from there, if
// their bytes are aligned in memory as they will be in the file (see ItemEncoder::tensor). Such
// memory must not change until the file is synced or destroyed. Tensors in device memory are
// fetched ahead (fetch_ahead_internal.h); those that are large are written from the buffers into
// which they were fetched.
#pragma once

#include "tilestone/base/block_sums.h"
#include "tilestone/base/buffer_pool.h"
#include "tilestone/base/deadline.h"
#include "tilestone/engine/run/progress_internal.h"
#include "tilestone/engine/write/fetch_ahead_internal.h"
#include "tilestone/format/format.h"
#include "tilestone/state/metadata.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// Shared by all streams of one rank.
struct StreamContext {
  std::shared_ptr<BufferPool> buffers;
  ProgressMeter* progress = nullptr;  // not owned
  Deadline deadline = Deadline::never();
};

// Used by one thread. Refers to the file and the context, which must outlive it.
class FileStream {
 public:
  // `fetched`: the tensors in device memory that are written, in their order.
  FileStream(WritableFile& file, StreamContext& context, FetchAhead fetched)
      : file_(file), context_(context), fetched_(std::move(fetched)) {}

  uint64_t position() const { return position_; }  // bytes written so far
  // Writes the item's padding and segments. Returns the checksums of the segments' bytes and of the
  // tensor's blocks. Each byte is summed once: the other checksums are combined from the blocks'.
  ItemChecksums write(const ItemRecipe& recipe);
  uint32_t write(ByteView bytes) { return literal(bytes, 0); }  // returns their CRC-32
  void finish();  // hands over the last, partly filled buffer

 private:
  MutableByteView room(uint64_t wanted);  // at least one byte, at most `wanted`
  void advance(size_t bytes);
  void zeros(uint64_t count);
  // The literal's bytes with the checksum filled in. Valid until the next call.
  ByteView with_crc32(const Literal& literal, uint32_t crc);
  uint32_t literal(ByteView bytes, uint32_t seed);
  void payload(const Segment& segment, ItemChecksums& sums);
  void tensor(const TensorView& tensor, uint64_t size, BlockSummer& sums);
  void padded(const TensorView& tensor, const Padding& padding, uint64_t size, BlockSummer& sums);
  void check_time() const;
  bool can_keep(const TensorView& tensor, uint64_t size) const;
  void packed(const TensorView& tensor, uint64_t begin, uint64_t end, BlockSummer& sums);
  void kept(ByteView bytes, BlockSummer& sums);
  void fetched(const TensorView& tensor, uint64_t size, BlockSummer& sums);
  uint32_t pack(const TensorView& tensor, uint64_t begin, MutableByteView out, uint32_t seed);

  WritableFile& file_;
  StreamContext& context_;
  FetchAhead fetched_;
  Buffer buffer_;
  Bytes patched_;
  uint64_t position_ = 0;
};

}  // namespace tilestone::engine
