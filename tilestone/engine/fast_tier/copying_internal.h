// Copying data files of a step, from a host to the run's directory or to another host, compared
// with their checksums on the way. A file that an earlier step has there (SaveOptions::reuse) is
// linked instead.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/plan/receipt.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// Reads a range of a file of a step. Used by one thread at a time.
using ReadRange =
    std::function<void(const std::string& file, uint64_t offset, MutableByteView target)>;
// Files that lie in a folder; each stays open.
ReadRange reading_of(std::shared_ptr<Storage> folder);

// Used once, by one thread. Takes two buffers of 8 MiB.
struct StepCopy {
  ReadRange from = {};
  std::shared_ptr<Storage> to = nullptr;
  std::shared_ptr<const Location> earlier = nullptr;  // a step of the same run there; null: none
  std::optional<uint64_t> bytes_per_second = std::nullopt;  // nullopt: as fast as it goes
  std::string scratch = "";            // what a file is called before it is whole
  std::vector<std::string> made = {};  // the files that were begun

  // Makes these files of the receipts durable; those of an earlier try are removed before.
  // Error(kCorrupt) names a file whose bytes are not those that were saved.
  void run(const std::vector<Receipt>& receipts, const std::set<std::string>& names,
           const Deadline& deadline);
};

}  // namespace tilestone::engine
