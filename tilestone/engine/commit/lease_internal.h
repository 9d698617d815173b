// A lease: a file that changes as long as its process works. Who finds it unchanged for a whole
// period, by his own clock that nobody sets, may take the process for dead. Nothing is compared
// with the clocks of other machines or of a file server.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "tilestone/base/per_process.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// How often it changes, and for how long it must not have changed: several misses in a row.
inline constexpr std::chrono::duration<double> kLeaseInterval{5};
inline constexpr std::chrono::duration<double> kLeasePeriod{60};

class Lease {
 public:
  // Writes the file now, and again at each interval on a thread of its own; the first failure is
  // logged. `temp_name` must be nobody else's.
  Lease(std::shared_ptr<Storage> storage, std::string name, std::string temp_name,
        std::chrono::duration<double> interval = kLeaseInterval);
  // Removes the file; in a child of fork nothing happens: the lease is its parent's.
  ~Lease();
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

 private:
  class Renewal;
  std::unique_ptr<PerProcess<Renewal>> renewal_;
};

}  // namespace tilestone::engine
