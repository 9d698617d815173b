// N ranks save random states, and M ranks load them with other shards. The states vary in shapes,
// dtypes, regular and irregular boxes, flat ranges, placements, prepended axes, empty shards,
// replicas and 0-d tensors. The tests use both ways of planning a save, loads by each rank for
// itself and in two phases, storage in memory and a real directory.
#include <gtest/gtest.h>

#include <filesystem>
#include <random>
#include <utility>

#include "tests/random_layout.h"
#include "tilestone/base/error.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/load/load.h"
#include "tilestone/engine/save/save.h"
#include "tilestone/format/zarr/zarr.h"
#include "tilestone/storage/memory_storage_testing.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::round_trip_test {

using tests::Fill;
using tests::Random;
using tests::Reference;

constexpr int kTrips = TILESTONE_ROUND_TRIPS;  // fewer under sanitizers; set by CMake
constexpr int kDirectoryEvery = 25;            // trips over a real directory

struct Trip {
  uint64_t seed;
  std::vector<Reference> tensors;
  SaveOptions save;
  LoadOptions load;
  int savers = 1;
  int loaders = 1;
  bool by_files = false;
  bool regular = false;  // saved as cells of regular grids
};

Trip make_trip(uint64_t seed) {
  Random random(seed);
  Trip trip{seed, {}, {}, {}};
  const size_t count = 1 + random() % 4;
  for (size_t i = 0; i < count; ++i) {
    trip.tensors.push_back(tests::random_tensor("key/" + std::to_string(i) + " ü", random));
  }
  trip.savers = static_cast<int>(1 + random() % 5);
  trip.loaders = static_cast<int>(1 + random() % 5);
  trip.by_files = random() % 2 == 0;
  trip.save.resources.files_per_rank = static_cast<int>(1 + random() % 2);
  trip.save.resources.buffer_bytes = trip.load.resources.buffer_bytes = 1u << 20;
  trip.save.timeout = trip.load.timeout = 120;
  trip.load.resources.threads = static_cast<int>(1 + random() % 2);
  if (random() % 2 == 0) trip.load.reading.two_phase = Reading::TwoPhase::kAlways;
  return trip;
}

// One rank's shards of all tensors. The seed determines the layouts, so it is the same on all
// ranks.
StateDict state_of(const Trip& trip, uint64_t seed, int rank, int world, Fill fill) {
  StateDict state;
  for (size_t i = 0; i < trip.tensors.size(); ++i) {
    Random random(seed + i);
    auto kind = tests::random_kind(random);
    if (trip.regular && fill == Fill::kData) {
      constexpr tests::LayoutKind kRegular[] = {
          tests::LayoutKind::kGrid, tests::LayoutKind::kPrepended, tests::LayoutKind::kReplicated};
      kind = kRegular[random() % 3];
    }
    size_t part = 0;
    for (ShardedTensor& tensor :
         tests::random_layout(trip.tensors[i], kind, random, rank, world, fill)) {
      state[std::to_string(i) + "." + std::to_string(part++)] = std::move(tensor);
    }
  }
  state["seed"] = static_cast<int64_t>(seed);
  return state;
}

void expect_loaded(const Trip& trip, const StateDict& loaded) {
  for (const auto& [key, node] : loaded.entries()) {
    const auto* tensor = node.get_if<ShardedTensor>();
    if (tensor == nullptr) continue;
    for (const Reference& reference : trip.tensors) {
      if (reference.key != tensor->key) continue;
      for (const Piece& piece : tensor->pieces) {
        ASSERT_EQ(tests::bytes_of(piece.data), tests::bytes_of(reference.all.narrow(piece.box)))
            << tensor->key << " " << to_string(piece.box);
      }
    }
  }
}

void run_trip(const Trip& trip, const Location& location) {
  run_ranks(trip.savers, [&](Communicator comm) {
    SaveOptions options = trip.save;
    if (trip.by_files) {
      options.by_files = ByFiles{comm.rank(), comm.size(), "a run of a test"};
    } else {
      options.comm = comm;
    }
    save(state_of(trip, trip.seed * 100, comm.rank(), comm.size(), Fill::kData), location, options);
  });
  run_ranks(trip.loaders, [&](Communicator comm) {
    LoadOptions options = trip.load;
    options.comm = comm;
    const Fill fill = trip.seed % 2 == 0 ? Fill::kMemory : Fill::kNone;
    StateDict wanted = state_of(trip, trip.seed * 100 + 50, comm.rank(), comm.size(), fill);
    wanted["seed"] = nullptr;
    const StateDict loaded = load(wanted, location, options);
    expect_loaded(trip, loaded);
    EXPECT_EQ(*loaded.find("seed")->get_if<Value>(), Value(static_cast<int64_t>(trip.seed * 100)));
  });
  if (trip.seed % 10 == 0) {
    const VerifyReport report = Checkpoint::open(location).verify();
    EXPECT_TRUE(report.ok()) << report.damages.front().problem;
    EXPECT_EQ(report.items_without_checksum, 0u);
  }
}

TEST(RoundTrip, RandomStatesOfNRanksLoadedByM) {
  const TempDirectory directory;
  const std::filesystem::path root = directory.path();
  for (uint64_t seed = 1; seed <= kTrips && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const bool real = seed % kDirectoryEvery == 0;
    if (real) std::filesystem::remove_all(root);
    const Location location = real ? Location(root) : Location(memory_storage());
    try {
      run_trip(make_trip(seed), location);
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
    }
  }
  std::printf("[          ] %d round trips\n", kTrips);
}

bool zarr_has(DType dtype) {
  Items items;
  items.tensors.push_back({.key = "w", .path = {}, .dtype = dtype, .global_shape = {}});
  try {
    zarr_format()->check(items);
  } catch (const Error&) {
    return false;
  }
  return true;
}

Trip make_zarr_trip(uint64_t seed) {
  Trip trip = make_trip(seed);
  trip.save.format = zarr_format();
  trip.by_files = false;
  trip.regular = seed % 2 == 0;
  Random random(seed);
  for (Reference& tensor : trip.tensors) {
    while (trip.regular && !zarr_has(tensor.all.dtype)) {
      tensor = tests::random_tensor(tensor.key, random);
    }
  }
  return trip;
}

TEST(RoundTrip, RandomStatesAreKeptInZarrOrRefusedByKey) {
  int kept = 0, refused = 0;
  for (uint64_t seed = 1; seed <= kTrips / 4 && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const auto storage = memory_storage();
    const Trip trip = make_zarr_trip(seed);
    try {
      run_trip(trip, Location(storage));
      ++kept;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
      EXPECT_TRUE(error.key().starts_with("key/")) << error.what();
      EXPECT_FALSE(trip.regular) << error.what();
      EXPECT_TRUE(storage->list().empty()) << storage->list().front();
      ++refused;
    }
  }
  EXPECT_GT(kept, kTrips / 8);
  EXPECT_GT(refused, kTrips / 80);
  std::printf("[          ] %d kept, %d refused\n", kept, refused);
}

// Keys are data. Whatever characters a key has, it is never a file name and never equals another
// key.
std::vector<std::string> odd_keys() {
  using namespace std::string_literals;
  std::vector<std::string> keys = {
      "",           " ",   ".",    "..", "/", "/etc/passwd", "../../up",        "a/../b",
      ".metadata",  "a.b", "a..b", "A",  "a", "line\nfeed",  "\x1b[31mred\x07", "nul\0inside"s,
      "nul\0other"s};
  keys.push_back("caf\xc3\xa9");       // composed
  keys.push_back("cafe\xcc\x81");      // decomposed: looks the same, but is another key
  keys.push_back("\xf0\x9f\x99\x82");  // beyond the Basic Multilingual Plane
  keys.emplace_back(64 << 10, 'k');
  keys.emplace_back((64 << 10) + 1, 'k');
  return keys;
}

TEST(RoundTrip, KeysOfAnyBytesComeBackAsTheyWere) {
  const std::vector<std::string> keys = odd_keys();
  const TempDirectory directory;
  const std::filesystem::path root = directory.path();
  std::vector<int64_t> values(2 * keys.size());
  const auto row = [&](size_t i) {
    return TensorView::contiguous(reinterpret_cast<std::byte*>(&values[2 * i]), DType::kInt64, {2});
  };
  StateDict state;
  StateDict wanted;
  for (size_t i = 0; i < keys.size(); ++i) {
    values[2 * i] = values[2 * i + 1] = static_cast<int64_t>(i + 1);
    state[keys[i]] = row(i);
    state["object " + keys[i]] = static_cast<int64_t>(i);
    wanted["object " + keys[i]] = nullptr;
  }
  save(state, root);
  const Checkpoint checkpoint = Checkpoint::open(root);
  EXPECT_TRUE(checkpoint.verify().ok());
  EXPECT_EQ(checkpoint.metadata().tensors.size(), keys.size());
  const StateDict objects = load(wanted, root);
  const std::vector<int64_t> saved = std::exchange(values, std::vector<int64_t>(values.size()));
  for (size_t i = 0; i < keys.size(); ++i) {
    SCOPED_TRACE(testing::PrintToString(keys[i].substr(0, 40)));
    state[keys[i]] = row(i);
    EXPECT_EQ(*objects.find("object " + keys[i])->get_if<Value>(), Value(static_cast<int64_t>(i)));
  }
  load(state, root);
  EXPECT_EQ(values, saved);
}

}  // namespace tilestone::round_trip_test
