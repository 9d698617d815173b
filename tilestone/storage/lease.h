// Claims in an object store, over put() and remove_if(): lease.cc describes the protocol.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "tilestone/base/deadline.h"
#include "tilestone/storage/storage.h"

namespace tilestone {

// How often the process that holds a lease renews it. All processes must have the same period.
std::chrono::duration<double> lease_period();
// For tests, in which the death of a process must be noticed soon.
void set_lease_period(std::chrono::duration<double> period);

// As Storage::claim() and is_claimed(), for a storage that has conditions.
std::unique_ptr<StorageClaim> claim_lease(const std::shared_ptr<Storage>& storage,
                                          const std::string& name,
                                          std::chrono::duration<double> period,
                                          const Deadline& patience);
bool is_leased(Storage& storage, const std::string& name, std::chrono::duration<double> period);

}  // namespace tilestone
