// A step of a fast tier as a storage to read from: the files of this host, those of the others
// through HostReads, and what no host has, from the run's directory.
#pragma once

#include <memory>
#include <string>

#include "tilestone/engine/fast_tier/host_folder_internal.h"
#include "tilestone/engine/fast_tier/host_reads_internal.h"
#include "tilestone/engine/save/kept_step_internal.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// `own`: the step's folder on this host; files that are there with their size are read there.
// `there`: the step in the run's directory; null: all files are on hosts.
std::shared_ptr<Storage> hosts_storage(std::shared_ptr<Storage> own, const KeptStep& about,
                                       const SaidStep& said, std::shared_ptr<HostReads> fetching,
                                       std::shared_ptr<Storage> there);

// A URL for such a storage, so that whatever reads checkpoints reads it: that which was given in
// this process for its save id. Valid as long as this exists. Not for two objects of one save id at
// a time.
class StepUrl {
 public:
  StepUrl(std::string save_id, std::shared_ptr<Storage> storage);
  ~StepUrl();
  StepUrl(const StepUrl&) = delete;
  StepUrl& operator=(const StepUrl&) = delete;
  std::string url() const;  // the same on every rank

 private:
  const std::string save_id_;
};

}  // namespace tilestone::engine
