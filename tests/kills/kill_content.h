// The state that the killed processes save, and the checks of the remaining checkpoints.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "tilestone/tilestone.h"

namespace tilestone::kills {

// A working folder with the checkpoints and the ranks' logs.
struct Places {
  std::filesystem::path root;
  // The location that every even generation overwrites.
  std::string latest() const { return (root / "latest").string(); }
  // The own location of an odd generation.
  std::string step(int64_t generation) const {
    return (root / "steps" / std::to_string(generation)).string();
  }
  std::string log(int rank) const { return (root / ("log." + std::to_string(rank))).string(); }
  // The location of a generation.
  std::string location(int64_t generation) const {
    return generation % 2 == 0 ? latest() : step(generation);
  }
};

// A tensor "w" sharded by rows, a replicated tensor "p", and "step". Every element is determined by
// its generation and position.
StateDict state_of(const Communicator& comm, int64_t generation);

// The generation at the location; -1 if there is no checkpoint. Throws std::runtime_error unless
// the checkpoint is whole, undamaged and of one generation, bit for bit.
int64_t whole_generation(const std::string& location);

// Saves a generation by one rank, overwriting anything at the location. Throws unless the location
// then holds this checkpoint and no file of another one.
void save_and_expect_no_leftovers(const std::string& location, int64_t generation);

// Saves generations from `first` on until it is killed or a save fails. Logs to places.log(rank),
// one line each: "pid N", "begin G", "done G", "failed TEXT".
void save_for_ever(const Communicator& comm, const Places& places, int64_t first, double timeout);

}  // namespace tilestone::kills
