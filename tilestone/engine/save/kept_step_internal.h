// What a host knows of a step of a fast tier: enough to open the step, and to copy it to the run's
// directory later, also by other processes.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/engine/commit/describe_internal.h"
#include "tilestone/format/index.h"
#include "tilestone/plan/receipt.h"

namespace tilestone::engine {

struct KeptStep {
  uint64_t step = 0;
  std::string save_id;
  bool drains = false;                            // it is to be copied to the run's directory
  bool replaces = false;                          // what the step's folder there may hold
  std::map<std::string, std::string> attributes;  // of the checkpoint, which name its line
  std::vector<ReceiptFile> files;                 // the data files of all ranks
  struct IndexEntry {
    std::string name;
    IndexRole role = IndexRole::kSwitch;
    bool of_dialect = false;
    uint64_t size = 0;  // bytes
  };
  std::vector<IndexEntry> index;
  uint64_t manifest_size = 0;  // bytes

  Bytes encode() const;                                             // a file's bytes
  static KeptStep decode(ByteView bytes, const std::string& file);  // Error(kCorrupt)
};

// The same with the bytes of the index and the manifest, which make a host's files a checkpoint of
// which the other hosts have the other files.
struct KeptIndex {
  KeptStep about;
  std::vector<Bytes> files;  // of about.index, in its order
  Bytes manifest;

  Bytes encode() const;
  static KeptIndex decode(ByteView bytes);
  NewIndex made() const;  // for a transaction
};

}  // namespace tilestone::engine
