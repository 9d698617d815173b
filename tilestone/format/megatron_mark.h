// The mark of a Megatron-Core checkpoint: its file metadata.json, which names the format.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "tilestone/base/bytes.h"

namespace tilestone {

inline constexpr std::string_view kMegatronConfig = "metadata.json";
inline constexpr std::string_view kMegatronCommon = "common.pt";

struct MegatronMark {
  // What metadata.json names as sharded_backend ("torch_dist", "zarr"), "unknown" where that is no
  // text. Empty: metadata.json is damaged, and only common.pt beside it shows whose it is.
  std::string backend;
};

// `names`: of all files of a directory, in any order. `read` returns a file's bytes and is called
// for metadata.json at most; what it throws comes out. Nothing for a metadata.json that some other
// program wrote: JSON without a field of Megatron-Core's.
std::optional<MegatronMark> find_megatron_mark(
    std::span<const std::string> names, const std::function<Bytes(const std::string&)>& read);

// What a metadata.json says of the format.
struct MegatronConfig {
  std::string backend;             // its sharded_backend; "unknown" where that is no text
  std::optional<int64_t> version;  // its sharded_backend_version; -1 where that is no integer
};
// nullopt where the bytes are not what Megatron-Core writes.
std::optional<MegatronConfig> read_megatron_config(ByteView bytes);
// What Megatron-Core would write there: it refuses other fields.
Bytes write_megatron_config(std::string_view backend, int backend_version);

}  // namespace tilestone
