// Takes any files as a checkpoint: opens it, reads everything, verifies it, removes leftovers.
//
// An input is a sequence of files: the length of the name (1 byte), the name, the size of the
// content (4 bytes, little-endian), the content. fuzz/make_inputs.py writes it.
#include <cstring>

#include "tilestone/base/error.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/storage/memory_storage_testing.h"

namespace {

using namespace tilestone;

constexpr uint64_t kLargeTensor = 16u << 20;  // bytes; larger tensors are not read

FileImage unpack(ByteView input) {
  FileImage image;
  while (!input.empty()) {
    const size_t length = std::min<size_t>(std::to_integer<size_t>(input[0]), input.size() - 1);
    const std::string name(reinterpret_cast<const char*>(input.data()) + 1, length);
    input = input.subspan(1 + length);
    uint32_t size = 0;
    std::memcpy(&size, input.data(), std::min(input.size(), sizeof size));
    input = input.subspan(std::min(input.size(), sizeof size));
    const ByteView content = input.first(std::min<size_t>(size, input.size()));
    input = input.subspan(content.size());
    try {
      check_file_name(name);
      image[name] = Bytes(content.begin(), content.end());
    } catch (const Error&) {  // no storage can hold such a file
    }
  }
  return image;
}

void read(const Checkpoint& checkpoint, const std::string& key) {
  try {
    const StoredTensor* tensor = checkpoint.metadata().find_tensor(key);
    if (tensor == nullptr) {
      to_string(checkpoint.read_object(key));
    } else if (static_cast<uint64_t>(numel(tensor->shape)) <= kLargeTensor) {
      checkpoint.read(key);
    }
  } catch (const Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto storage = memory_storage(unpack({reinterpret_cast<const std::byte*>(data), size}));
  OpenOptions options;
  options.resources.threads = 1;
  options.resources.buffer_bytes = 1u << 20;
  try {
    const Checkpoint checkpoint = Checkpoint::open(Location(storage), options);
    for (const std::string& key : checkpoint.keys()) read(checkpoint, key);
    checkpoint.verify();
  } catch (const Error&) {
  }
  try {
    remove_leftovers(Location(storage));
  } catch (const Error&) {
  }
  return 0;
}
