#include "tilestone/engine/checkpoint/mapped_reads_internal.h"

#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/read/payloads_internal.h"
#include "tilestone/storage/private_map.h"

namespace tilestone::engine {
namespace {

// Whether the tensor is one item, and the item holds nothing else. A write to memory that two
// tensors share would change both.
bool is_one_item(const ReadContext& context, const StoredTensor& tensor) {
  if (tensor.chunks.size() != 1 || tensor.chunk_shape) return false;
  if (context.format.items_may_share_bytes()) return false;
  const StoredChunk& chunk = tensor.chunks[0];
  return !chunk.flat && !chunk.strides && chunk.at.codec == Codec::kNone && !chunk.box.empty() &&
         chunk.box == Box::whole(tensor.shape);
}

bool is_run(const StoredPayload& payload) {
  const Dims contiguous = contiguous_strides(payload.shape);
  for (size_t d = 0; d < payload.shape.size(); ++d) {
    if (payload.shape[d] > 1 && payload.strides[d] != contiguous[d]) return false;
  }
  return true;
}

}  // namespace

MappedReads::MappedReads(const ReadContext& context) {
  if (!context.storage.facts().page_cache) {
    throw Error(ErrorCode::kUnsupported,
                "mapped reads need files, and there are none at " + context.storage.describe())
        .with_hint("open it without `mapped`, or copy it to a directory first");
  }
  for (const StoredTensor& tensor : context.metadata.tensors) {
    if (!is_one_item(context, tensor) || files_.contains(tensor.chunks[0].at.file)) continue;
    File& file = files_[tensor.chunks[0].at.file];
    try {
      const auto opened = context.storage.open(context.metadata.files[tensor.chunks[0].at.file]);
      file = {map_private(*opened), opened->size()};
    } catch (const Error& error) {  // a read says what is wrong with the file
      if (error.code() == ErrorCode::kInterrupted) throw;
    }
  }
}

std::vector<std::optional<TensorView>> MappedReads::find(const ReadContext& context,
                                                         std::span<const uint32_t> tensors) const {
  std::vector<std::optional<TensorView>> found(tensors.size());
  std::vector<size_t> which;  // of `tensors`
  std::vector<ChunkRef> chunks;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const StoredTensor& tensor = context.metadata.tensors[tensors[i]];
    if (!is_one_item(context, tensor) || !files_.at(tensor.chunks[0].at.file).memory) continue;
    which.push_back(i);
    chunks.push_back({tensors[i], 0});
  }
  const std::vector<StoredPayload> payloads = find_payloads(context, chunks);
  for (size_t i = 0; i < chunks.size(); ++i) {
    const StoredTensor& tensor = context.metadata.tensors[chunks[i].tensor];
    const ItemLocation& at = tensor.chunks[0].at;
    const File& file = files_.at(at.file);
    const uint64_t element = itemsize(tensor.dtype);
    const uint64_t bytes =
        checked_mul(static_cast<uint64_t>(numel(tensor.shape)), element, "bytes of a tensor");
    const auto begin = try_add(at.offset, payloads[i].offset);
    if (!begin || *begin > file.size || bytes > file.size - *begin) continue;  // a read fails
    if (*begin % element != 0 || !is_run(payloads[i])) continue;
    found[which[i]] =
        TensorView::contiguous(file.memory.get() + *begin, tensor.dtype, tensor.shape, file.memory);
  }
  return found;
}

}  // namespace tilestone::engine
