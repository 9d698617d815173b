// Saves, loads and checks of more files than the process may have open.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "tilestone/comm/communicator.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/storage/posix_testing.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::open_files_test {

constexpr int kFiles = 300;

StateDict numbered(int64_t first) {
  StateDict state;
  for (int i = 0; i < kFiles; ++i) {
    state["t" + std::to_string(i)] = counting(DType::kInt64, {3}, first + i);
  }
  return state;
}

TEST(OpenFiles, OfManyFilesOnlyAFewAreOpenAtATime) {
  const TempDirectory directory;
  const FilesLeft few(90);
  for (const int ranks : {1, 2}) {
    const Location location(directory.path() + "/" + std::to_string(ranks));
    run_ranks(ranks, [&](const Communicator& comm) {
      SaveOptions saving;
      saving.comm = comm;
      saving.resources.files_per_rank = kFiles;
      save(numbered(5), location, saving);
      StateDict state = numbered(0);
      LoadOptions loading;
      loading.comm = comm;
      load(state, location, loading);
      const StateDict wanted = numbered(5);
      for (const auto& [key, value] : wanted.entries()) {
        const TensorView& expected = wanted.get<TensorView>(key);
        const TensorView& found = state.get<TensorView>(key);
        EXPECT_TRUE(std::equal(expected.data, expected.data + expected.bytes(), found.data));
      }
    });
    EXPECT_TRUE(Checkpoint::open(location).verify().ok());
  }
}

}  // namespace tilestone::open_files_test
