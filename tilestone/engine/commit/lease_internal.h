// A lease: a file that a process rewrites at intervals as long as it works. An observer that finds
// the file unchanged for a whole period may consider the process dead. The observer measures the
// period with its own monotonic clock; clocks of other machines or of a file server play no part.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "tilestone/base/per_process.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// How often the file is rewritten, and for how long it must be unchanged before its process may be
// considered dead. The period covers several missed rewrites in a row.
inline constexpr std::chrono::duration<double> kLeaseInterval{5};
inline constexpr std::chrono::duration<double> kLeasePeriod{60};

class Lease {
 public:
  // Writes the file now, and again after each interval on a thread of its own. Logs the first
  // failure. No other call may use `temp_name`.
  Lease(std::shared_ptr<Storage> storage, std::string name, std::string temp_name,
        std::chrono::duration<double> interval = kLeaseInterval);
  // Removes the file. Does nothing in a forked child, because the lease belongs to the parent.
  ~Lease();
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

 private:
  class Renewal;
  std::unique_ptr<PerProcess<Renewal>> renewal_;
};

}  // namespace tilestone::engine
