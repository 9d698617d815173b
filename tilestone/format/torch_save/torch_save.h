// Files of torch.save, opened as checkpoints without reading more than their pickle.
//
// Such a file is a zip archive of stored records: a pickle, and one record for each storage of a
// tensor. Its tensors are read where they are. What is not there as a run of bytes is packed when
// it is read: objects, and tensors that are not contiguous. A storage
// (engine/run/torch_save_storage.cc) presents the file as a directory of these files:
//
//   NAME             the file itself
//   NAME:2, ...      the same once more: tensors that share bytes are items of different files
//   NAME:packed      what is packed
//   NAME:torch_save  the index: a receipt of the items, without a save id, and why objects can't be
//   read
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/format/format.h"
#include "tilestone/state/tensor_view.h"

namespace tilestone {

// For reading. Its check() refuses every save: only a conversion writes files of torch.save.
std::shared_ptr<const Format> torch_save_format();

struct TorchSaveFile {
  // One object or tensor of NAME:packed, which are one after the other.
  struct Packed {
    uint64_t offset = 0;     // bytes
    uint64_t size = 0;       // bytes
    Bytes bytes = {};        // of an object
    TensorView tensor = {};  // whose elements follow one another when they are packed
  };

  std::string index_name;
  Bytes index;
  std::string packed_name;
  std::vector<Packed> packed;
  uint64_t packed_bytes = 0;
  std::vector<std::string> names;  // of the file itself: NAME, NAME:2, ...
};

// Whether files of torch.save are named so: ".pt", ".pth", ".bin", ".ckpt".
bool is_torch_save_name(std::string_view name);

// What the file holds. `archive`: its bytes, of which only the pickle and the directory of the
// records are read. The result borrows them. Throws Error(kCorrupt, kUnsafe, kUnsupported), naming
// the file.
TorchSaveFile describe_torch_save(ByteView archive, const std::string& name);

}  // namespace tilestone
