// Recognises a Megatron-Core checkpoint by its file metadata.json, which names the format.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tilestone/base/bytes.h"

namespace tilestone {

inline constexpr std::string_view kMegatronConfig = "metadata.json";
inline constexpr std::string_view kMegatronCommon = "common.pt";
inline constexpr std::string_view kMegatronHashes = "integrity.json";

struct MegatronMark {
  // The sharded_backend in metadata.json ("torch_dist", "zarr"); "unknown" if that is not a string.
  // Empty: metadata.json is damaged, but the common.pt beside it shows that Megatron-Core wrote it.
  std::string backend;
};

// `names`: all files of a directory, sorted. `read` returns a file's bytes; it is called only
// for metadata.json, and its exceptions are passed on. Returns nullopt if there is no metadata.json
// or another program wrote it (it is JSON without any of Megatron-Core's fields).
std::optional<MegatronMark> find_megatron_mark(
    std::span<const std::string> names, const std::function<Bytes(const std::string&)>& read);

// The fields of metadata.json that describe the format.
struct MegatronConfig {
  std::string backend;             // sharded_backend; "unknown" if it is not a string
  std::optional<int64_t> version;  // sharded_backend_version; -1 if it is not an integer
};
// Parses a metadata.json. nullopt if it is not a JSON object with a sharded_backend.
std::optional<MegatronConfig> read_megatron_config(ByteView bytes);
// The hashes in an integrity.json.
struct MegatronHashes {
  std::string save_id;  // of the save; "": not recorded, as by Megatron-Core
  std::vector<std::pair<std::string, std::string>> files;  // name, SHA-256 in hex
};
// nullopt if it does not hold SHA-256 hashes of files of the directory itself.
std::optional<MegatronHashes> read_megatron_hashes(ByteView bytes);
// A metadata.json as Megatron-Core writes it. It has no other fields, because Megatron-Core refuses
// them.
Bytes write_megatron_config(std::string_view backend, int backend_version);

}  // namespace tilestone
