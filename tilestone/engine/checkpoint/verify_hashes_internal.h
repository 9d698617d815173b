// Compares a checkpoint's files with the hashes in an integrity.json (Megatron-Core's from 0.17
// on).
#pragma once

#include <string>
#include <vector>

#include "tilestone/base/thread_pool.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// The damages: a file that is missing, differs, or is not named there; or the hashes can't be read.
// Empty if there is no such file, or if it is of another save than `save_id` ("": unknown), which
// is logged. Of several ranks that check together, each checks its part of the files.
std::vector<Damage> check_hashes(Storage& storage, const std::string& save_id, ThreadPool& threads,
                                 size_t rank = 0, size_t ranks = 1);

// The SHA-256 of a file's bytes, in hex.
std::string sha256_of_file(Storage& storage, const std::string& name);

}  // namespace tilestone::engine
