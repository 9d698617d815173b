// Helpers for tests that save and load.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/load/load.h"
#include "tilestone/engine/save/save.h"
#include "tilestone/storage/memory_storage_testing.h"

namespace tilestone {

// A tensor whose element i (in C order) is `first + i`, in its own memory.
TensorView counting(DType dtype, const Dims& shape, int64_t first = 0);
// The bytes of a tensor's elements in C order.
Bytes elements(const TensorView& tensor);

// Row `rank` of a tensor "w" with `ranks` rows of 8 float32, counting from `first`; a plain tensor
// "p" that every rank has; and a value "step".
StateDict row_state(int rank, int ranks, int64_t first = 3);
StateDict row_state(const Communicator& comm, int64_t first);
// The same without content: a template for a load.
StateDict row_template(const Communicator& comm);
// A state that can't be saved: its tensor has no data.
StateDict hollow_state();
// "step" and the elements of "p" in a checkpoint of row_state(), whether they are stored as items
// or in the common state.
Value step_of(const Checkpoint& checkpoint);
Bytes plain_of(const Checkpoint& checkpoint);
// Locations in memory, each empty.
std::vector<Location> memory_locations(size_t count);
// Expects that the location holds row_state(·, first) of `rows` ranks. Reads without a template.
void expect_rows(const Location& location, int64_t first, int rows);

// A checkpoint without the files that only Tilestone knows.
FileImage without_tilestones_files(FileImage image);
// A torch_dist checkpoint as another writer leaves it: also the data files have other names.
FileImage as_of_another_writer(FileImage image);

// Options of a save without a communicator, with one thread and a timeout of 30 s.
inline constexpr const char* kToken = "a run of a test";
SaveOptions by_files(int rank, int ranks, const std::string& token = kToken, bool wait = false);
// The same in torch's rank-local mode.
SaveOptions rank_local(int rank, int ranks, uint64_t number = 0);

// Collects the warnings that are logged while the object lives. Drops all other levels.
class LoggedWarnings {
 public:
  LoggedWarnings();
  ~LoggedWarnings();
  LoggedWarnings(const LoggedWarnings&) = delete;
  LoggedWarnings& operator=(const LoggedWarnings&) = delete;
  std::vector<std::string> texts() const;

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> texts_;
};

// The text of what each rank of a group of `n` threw; "" if it threw nothing.
std::vector<std::string> failures(int n, const std::function<void(Communicator)>& body);

}  // namespace tilestone
