// Measures a save and a load by ranks that are threads of one process:
//
//   scaling SAVERS LOADERS TENSORS BYTES DIR
//
// SAVERS ranks save TENSORS tensors to DIR, which have BYTES bytes in all and are sharded by rows.
// LOADERS ranks load them, sharded by columns. Prints the seconds of each call as JSON. The exit
// status is 1 if a loaded byte differs from the saved one.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "tilestone/comm/threads_testing.h"
#include "tilestone/tilestone.h"

namespace {

using namespace tilestone;

struct Job {
  int ranks = 1;
  int64_t tensors = 1;
  Dims shape;  // of each tensor, bytes
};

// The value of one element of a tensor.
std::byte expected(int64_t tensor, int64_t row, int64_t column) {
  return static_cast<std::byte>(tensor * 31 + row * 7 + column * 3);
}

Box part_of(const Job& job, size_t dim, int rank) {
  Box box = Box::whole(job.shape);
  const int64_t size = job.shape[dim];
  box.offset[dim] = size * rank / job.ranks;
  box.shape[dim] = size * (rank + 1) / job.ranks - box.offset[dim];
  return box;
}

StateDict state_of(const Job& job, size_t dim, int rank) {
  const Box box = part_of(job, dim, rank);
  StateDict state;
  for (int64_t t = 0; t < job.tensors; ++t) {
    const std::string key = "layer" + std::to_string(t / 10) + ".p" + std::to_string(t % 10);
    const TensorView view = TensorView::allocate(DType::kUInt8, box.shape);
    std::memset(view.data, 0xEE, view.bytes());
    state[key] = ShardedTensor::from_box(key, view, job.shape, box);
  }
  return state;
}

// Calls visit(tensor, row, column, byte) for every byte that the rank holds.
template <typename Visit>
void for_each(const StateDict& state, const Visit& visit) {
  int64_t t = 0;
  for (const auto& [key, node] : state) {
    const ShardedTensor& tensor = *node.template get_if<ShardedTensor>();
    std::byte* at = tensor.data.data;
    for (int64_t row = tensor.box.offset[0]; row < tensor.box.end(0); ++row) {
      for (int64_t column = tensor.box.offset[1]; column < tensor.box.end(1); ++column) {
        visit(t, row, column, *at++);
      }
    }
    ++t;
  }
}

// Runs work(the rank's state, communicator) on every rank. Returns the seconds from the first start
// to the last end.
double on_all(std::vector<StateDict>& states,
              const std::function<void(StateDict&, const Communicator&)>& work) {
  const auto begin = std::chrono::steady_clock::now();
  run_ranks(static_cast<int>(states.size()), [&](const Communicator& comm) {
    work(states[static_cast<size_t>(comm.rank())], comm);
  });
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

int run(const Job& savers, const Job& loaders, const std::string& folder) {
  std::vector<StateDict> saved;
  for (int rank = 0; rank < savers.ranks; ++rank) saved.push_back(state_of(savers, 0, rank));
  for (StateDict& state : saved) {
    for_each(state, [](int64_t t, int64_t row, int64_t column, std::byte& byte) {
      byte = expected(t, row, column);
    });
  }
  const double saving = on_all(saved, [&](StateDict& state, const Communicator& comm) {
    save(state, folder, {.comm = comm});
  });
  saved.clear();
  std::vector<StateDict> wanted;
  for (int rank = 0; rank < loaders.ranks; ++rank) wanted.push_back(state_of(loaders, 1, rank));
  const double loading = on_all(wanted, [&](StateDict& state, const Communicator& comm) {
    load(state, folder, {.comm = comm});
  });
  uint64_t wrong = 0;
  uint64_t bytes = 0;
  for (StateDict& state : wanted) {
    for_each(state, [&](int64_t t, int64_t row, int64_t column, std::byte& byte) {
      wrong += byte != expected(t, row, column) ? 1 : 0;
      ++bytes;
    });
  }
  std::printf(
      "{\"savers\": %d, \"loaders\": %d, \"tensors\": %lld, \"bytes\": %llu, "
      "\"save_seconds\": %.4f, \"load_seconds\": %.4f, \"wrong_bytes\": %llu}\n",
      savers.ranks, loaders.ranks, static_cast<long long>(savers.tensors),
      static_cast<unsigned long long>(bytes), saving, loading,
      static_cast<unsigned long long>(wrong));
  return wrong == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t bytes = argc == 6 ? std::atoll(argv[4]) : 0;
  Job savers{argc == 6 ? std::atoi(argv[1]) : 0, argc == 6 ? std::atoll(argv[3]) : 0, {}};
  if (savers.ranks < 1 || savers.tensors < 1 || bytes < savers.tensors) {
    std::fprintf(stderr, "usage: scaling SAVERS LOADERS TENSORS BYTES DIR\n");
    return 2;
  }
  const int64_t each = bytes / savers.tensors;
  int64_t rows = 1;
  while (rows * rows * 4 <= each && each % (rows * 2) == 0) rows *= 2;
  savers.shape = {rows, each / rows};
  Job loaders = savers;
  loaders.ranks = std::atoi(argv[2]);
  if (loaders.ranks < 1) return 2;
  try {
    return run(savers, loaders, argv[5]);
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
