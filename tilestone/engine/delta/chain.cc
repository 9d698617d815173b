#include "tilestone/engine/delta/chain_internal.h"

#include <fmt/format.h>

#include "tilestone/base/error.h"
#include "tilestone/engine/delta/versions_internal.h"

namespace tilestone::engine {

void fail_base(const DeltaFile& delta, const std::string& key, const std::string& problem) {
  const std::string chain = chain_text(delta.folder());
  throw Error(ErrorCode::kMismatch, fmt::format("this is not the base of the delta {}, whose id is "
                                                "{}: {}",
                                                delta.describe(), delta.index().base, problem))
      .with_key(key)
      .with_hint(
          "apply the deltas between them first, in their order, or begin with a whole "
          "version" +
          (chain.empty() ? "" : "; the chain is " + chain));
}

void expect_base(const DeltaFile& delta, const DeltaTensor& tensor, uint32_t crc32) {
  if (crc32 == tensor.before) return;
  if (crc32 == tensor.after) {
    fail_base(delta, tensor.key, "the tensor is that of the new version already");
  }
  fail_base(
      delta, tensor.key,
      fmt::format("the CRC-32 of the tensor is {:08x}, expected {:08x}", crc32, *tensor.before));
}

void expect_result(const DeltaFile& delta, const DeltaTensor& tensor, uint32_t crc32) {
  if (crc32 == tensor.after) return;
  throw Error(ErrorCode::kCorrupt,
              fmt::format("the delta {} leads to a tensor with the CRC-32 {:08x}, expected {:08x}",
                          delta.describe(), crc32, *tensor.after))
      .with_key(tensor.key)
      .with_hint("make the delta again: it is damaged, or its writer has a defect");
}

}  // namespace tilestone::engine
