#include <fmt/format.h>

#include "tilestone/base/error.h"
#include "tilestone/engine/delta/check_internal.h"
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

void expect_keys(const DeltaFile& delta, const SummedTensors& tensors) {
  for (const DeltaTensor& tensor : delta.index().tensors) {
    if (!tensor.before) continue;
    const auto found = tensors.find(tensor.key);
    if (found == tensors.end()) fail_base(delta, tensor.key, "the tensor is not there");
    const SummedTensor& has = found->second;
    if (has.dtype == tensor.dtype && has.shape == tensor.shape) continue;
    fail_base(
        delta, tensor.key,
        fmt::format("the tensor is {} {}, and {} {} in the delta's base", to_string(has.dtype),
                    to_string(has.shape), to_string(tensor.dtype), to_string(tensor.shape)));
  }
  for (const auto& [key, has] : tensors) {
    if (delta.in_base(key) == nullptr) fail_base(delta, key, "the delta's base has no such tensor");
  }
}

void expect_base(const DeltaFile& delta, const SummedTensors& tensors) {
  expect_keys(delta, tensors);
  for (const DeltaTensor& tensor : delta.index().tensors) {
    if (!tensor.before) continue;
    const uint32_t crc32 = tensors.find(tensor.key)->second.crc32();
    if (crc32 == tensor.before) continue;
    fail_base(delta, tensor.key,
              crc32 == tensor.after
                  ? "the tensor is that of the new version already"
                  : fmt::format("the CRC-32 of the tensor is {:08x}, expected {:08x}", crc32,
                                *tensor.before));
  }
}

void expect_result(const DeltaFile& delta, const SummedTensors& tensors) {
  for (const DeltaTensor& tensor : delta.index().tensors) {
    if (!tensor.after) continue;
    const uint32_t crc32 = tensors.find(tensor.key)->second.crc32();
    if (crc32 == tensor.after) continue;
    throw Error(
        ErrorCode::kCorrupt,
        fmt::format("the delta {} leads to a tensor with the CRC-32 {:08x}, expected {:08x}",
                    delta.describe(), crc32, *tensor.after))
        .with_key(tensor.key)
        .with_hint("make the delta again: it is damaged, or its writer has a defect");
  }
}

}  // namespace tilestone::engine
