// A URL for a step of a fast tier, so that whatever reads checkpoints reads it: the storage of this
// process that was given for its save id.
#pragma once

#include <memory>
#include <string>

#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// Valid as long as this exists. Not for two objects of one save id at a time.
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
