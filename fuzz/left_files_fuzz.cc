// Takes any bytes as a file that a rank leaves in a save without a communicator: as they are, and
// with a corrected checksum. Parsed content must be the same after writing and reading it again.
#include <cstdlib>
#include <optional>
#include <vector>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/comm/store_communicator.h"
#include "tilestone/engine/open/attempt_files_internal.h"

namespace {

using tilestone::Bytes;
using tilestone::ByteView;
using namespace tilestone::engine;

Bytes sealed(ByteView bytes) {
  tilestone::ByteWriter out;
  out.raw(bytes);
  out.u64(tilestone::xxh3_64(bytes));
  return std::move(out).take();
}

template <typename Left>
void attempt(ByteView bytes) {
  std::optional<Left> left;
  try {
    left = Left::decode(bytes, "a file");
  } catch (const tilestone::Error&) {
    return;
  }
  const Bytes written = left->encode();
  if (Left::decode(written, "a file").encode() != written) abort();
}

// Parser and writer of a group's file.
struct Group {
  std::vector<std::optional<Bytes>> left;
  Bytes encode() const { return tilestone::join_messages(left); }
  static Group decode(ByteView bytes, const std::string& file) {
    const std::vector<Bytes> messages = tilestone::split_messages(bytes, file);
    return {{messages.begin(), messages.end()}};
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const ByteView bytes(reinterpret_cast<const std::byte*>(data), size);
  for (const Bytes& input : {Bytes(bytes.begin(), bytes.end()), sealed(bytes)}) {
    attempt<AttemptHead>(input);
    attempt<AttemptReceipt>(input);
    attempt<LeftFailure>(input);
    attempt<Group>(input);
  }
  return 0;
}
