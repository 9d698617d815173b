// What the processes that are killed save, and what the judge expects to find.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "tilestone/tilestone.h"

namespace tilestone::kills {

// A working folder: where the saves go and what the ranks tell.
struct Places {
  std::filesystem::path root;
  // Overwritten by every even generation.
  std::string latest() const { return (root / "latest").string(); }
  // Each odd generation has a location of its own.
  std::string step(int64_t generation) const {
    return (root / "steps" / std::to_string(generation)).string();
  }
  std::string log(int rank) const { return (root / ("log." + std::to_string(rank))).string(); }
  // Where a generation goes.
  std::string location(int64_t generation) const {
    return generation % 2 == 0 ? latest() : step(generation);
  }
};

// Rows "w" of all ranks, a replicated tensor "p" and "step"; every element tells its generation
// and place.
StateDict state_of(const Communicator& comm, int64_t generation);

// The generation that the location holds, -1: no checkpoint. Throws std::runtime_error unless the
// checkpoint is whole, undamaged and of one generation, bit for bit.
int64_t whole_generation(const std::string& location);

// Saves, by one rank over whatever is there, and throws unless the location then holds this
// checkpoint and no file of any other.
void save_and_expect_no_leftovers(const std::string& location, int64_t generation);

// Saves generations from `first` on until it is killed or a save fails; tells in places.log(rank),
// a line each: "pid N", "begin G", "done G", "failed TEXT".
void save_for_ever(const Communicator& comm, const Places& places, int64_t first, double timeout);

}  // namespace tilestone::kills
