// Saves a matrix that is sharded by rows, and loads it sharded by columns on another number of MPI
// ranks:
//   mpirun -n 4 mpi_reshard save ckpt
//   mpirun -n 3 mpi_reshard load ckpt
// The matrix can be divided among 1 to 7 ranks.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "tilestone/tilestone.h"

namespace {

constexpr int64_t kRows = 840;
constexpr int64_t kColumns = 420;

int64_t expected(int64_t row, int64_t column) { return row * kColumns + column; }

void save(const tilestone::Communicator& comm, const char* folder) {
  const int64_t rows = kRows / comm.size();
  std::vector<int64_t> mine;
  for (int64_t row = comm.rank() * rows; row < (comm.rank() + 1) * rows; ++row) {
    for (int64_t column = 0; column < kColumns; ++column) mine.push_back(expected(row, column));
  }
  const auto view = tilestone::TensorView::of(mine, {rows, kColumns});
  tilestone::StateDict state;
  state["matrix"] = tilestone::ShardedTensor::from_rank_offsets(
      "matrix", view, {{.axis = 0, .rank = comm.rank(), .fragments = comm.size()}});
  state["step"] = 1200;
  tilestone::save(state, folder, {.comm = comm, .overwrite = true});
}

// Returns the number of loaded elements that differ from the saved ones.
int64_t load(const tilestone::Communicator& comm, const char* folder) {
  const int64_t columns = kColumns / comm.size();
  std::vector<int64_t> mine(static_cast<size_t>(kRows * columns), -1);
  const auto view = tilestone::TensorView::of(mine, {kRows, columns});
  tilestone::StateDict wanted;
  wanted["matrix"] = tilestone::ShardedTensor::from_rank_offsets(
      "matrix", view, {{.axis = 1, .rank = comm.rank(), .fragments = comm.size()}});
  wanted["step"] = nullptr;
  const tilestone::StateDict loaded = tilestone::load(wanted, folder, {.comm = comm});

  int64_t differences = 0;
  for (size_t i = 0; i < mine.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    const int64_t column = comm.rank() * columns + at % columns;
    if (mine[i] != expected(at / columns, column)) ++differences;
  }
  if (loaded.get<int>("step") != 1200) ++differences;
  return differences;
}

}  // namespace

int main(int argc, char** argv) {
  const bool saves = argc == 3 && std::strcmp(argv[1], "save") == 0;
  const bool loads = argc == 3 && std::strcmp(argv[1], "load") == 0;
  if (!saves && !loads) {
    std::fprintf(stderr, "usage: mpi_reshard save|load FOLDER\n");
    return 2;
  }
  try {
    const tilestone::Communicator comm = tilestone::mpi_world();
    if (kRows % comm.size() != 0 || kColumns % comm.size() != 0) {
      std::fprintf(stderr, "the matrix cannot be divided evenly among %d ranks\n", comm.size());
      return 2;
    }
    if (saves) {
      save(comm, argv[2]);
      std::printf("rank %d of %d saved its rows\n", comm.rank(), comm.size());
      return 0;
    }
    const int64_t differences = load(comm, argv[2]);
    std::printf("rank %d of %d loaded its columns: %lld elements differ\n", comm.rank(),
                comm.size(), static_cast<long long>(differences));
    return differences == 0 ? 0 : 1;
  } catch (const tilestone::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
