// Takes any bytes as a rank's file of torch_checkpointing, and as the index of such a folder.
#include <cstdlib>
#include <optional>

#include "tilestone/base/error.h"
#include "tilestone/format/torch_checkpointing/torch_checkpointing.h"

namespace {

using namespace tilestone;

// Reads the parts of the file that the format asks for, as an engine does.
FileParts parts_of(const Format& format, ByteView file) {
  FileParts read{file.size(), {}};
  while (const auto next = format.next_part("model_0.pt", read)) {
    if (next->offset > file.size() || next->size > file.size() - next->offset) abort();
    const ByteView part = file.subspan(next->offset, next->size);
    if (!read.parts.emplace(next->offset, Bytes(part.begin(), part.end())).second) abort();
  }
  return read;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const ByteView bytes(reinterpret_cast<const std::byte*>(data), size);
  const auto format = torch_checkpointing_format();
  DirectoryFiles with_file{.names = {"model_0.pt"}, .contents = {}, .sizes = {}};
  DirectoryFiles with_index{.names = {"metadata.pkl", "model_0.pt"},
                            .contents = {{"metadata.pkl", Bytes(bytes.begin(), bytes.end())}},
                            .sizes = {}};
  try {
    with_file.parts.emplace("model_0.pt", parts_of(*format, bytes));
    format->parse_index(with_file);
  } catch (const Error&) {
  }
  try {
    format->parse_index(with_index);
  } catch (const Error&) {
  }
  return 0;
}
