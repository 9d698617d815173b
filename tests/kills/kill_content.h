// The state that the killed processes save, and the checks of the remaining checkpoints.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "tilestone/tilestone.h"

namespace tilestone::kills {

// What a save makes: a torch_dist checkpoint in PyTorch's dialect, or a torch_dist or zarr
// checkpoint in Megatron-Core's. One rename can't switch the index of the last two, so a save that
// overwrites them exchanges two directories.
enum class Kind : uint8_t { kTorch, kMegatron, kZarr };
inline constexpr Kind kKinds[] = {Kind::kTorch, Kind::kMegatron, Kind::kZarr};
std::string_view to_string(Kind kind);  // "torch", "megatron", "zarr"
Kind kind_named(std::string_view name);
// Options of a save with overwrite.
SaveOptions options_of(Kind kind);

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

inline constexpr int64_t kRowElements = 60000;

// A tensor "w" sharded by rows of `row_elements`, a replicated tensor "p", and "step". Every
// element is determined by its generation and position.
StateDict state_of(const Communicator& comm, int64_t generation,
                   int64_t row_elements = kRowElements);

// The generation at the location; -1 if there is no checkpoint. Throws std::runtime_error unless
// the checkpoint is of this kind, whole, undamaged and of one generation, bit for bit: read as a
// whole, and loaded by four ranks that share "w" by columns.
int64_t whole_generation(const std::string& location, Kind kind);

// Throws unless the files at the location are those of one save of this kind by one rank, and no
// save has left a directory beside it.
void expect_no_leftovers(const std::string& location, Kind kind, const std::string& save_id);

// Saves a generation by one rank, overwriting anything at the location. Throws unless the location
// then holds this checkpoint and no file of another one.
void save_and_expect_no_leftovers(const std::string& location, Kind kind, int64_t generation);

// Saves generations from `first` on until it is killed or a save fails. `in_background`: by
// async_save, in a session; the next generation is begun while a save is in flight. Logs to
// places.log(rank), one line each: "pid N", "begin G", "done G", "failed TEXT".
void save_for_ever(const Communicator& comm, const Places& places, Kind kind, int64_t first,
                   double timeout, bool in_background = false);

}  // namespace tilestone::kills
