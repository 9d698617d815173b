// Incidents of other checkpoint libraries, each as a test. Incidents that involve only one layer
// are tested beside that layer's code.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>

#include "tilestone/comm/threads_testing.h"
#include "tilestone/comm/together_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/format/torch_dist/torch_dist.h"
#include "tilestone/geometry/strided_copy.h"
#include "tilestone/storage/directories.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"
#include "tilestone/storage/posix_storage.h"

namespace tilestone::incidents_test {

namespace fs = std::filesystem;
using testing::Each;
using testing::HasSubstr;

// A real folder, which is removed with the object.
class Folder {
 public:
  explicit Folder(const std::string& name)
      : path_(fs::path(testing::TempDir()) / ("tilestone_incident_" + name)) {
    fs::remove_all(path_);
  }
  ~Folder() { fs::remove_all(path_); }
  const fs::path& path() const { return path_; }

 private:
  const fs::path path_;
};

SaveOptions saving(const Communicator& comm, bool overwrite = false) {
  SaveOptions options;
  options.comm = comm;
  options.resources.buffer_bytes = 1u << 20;
  options.resources.threads = 1;
  options.timeout = 60;
  options.overwrite = overwrite;
  return options;
}

LoadOptions loading(const Communicator& comm) {
  LoadOptions options;
  options.comm = comm;
  options.resources.buffer_bytes = 1u << 20;
  options.resources.threads = 1;
  options.timeout = 60;
  return options;
}

void save_rows(const Location& location, int ranks, int64_t first, bool overwrite = false) {
  run_ranks(ranks, [&](Communicator comm) {
    save(row_state(comm, first), location, saving(comm, overwrite));
  });
}

// ---- Shards ----

// The rank's chunk, on a 1-D mesh, of a 1-D tensor whose `count` elements count from 0.
ShardedTensor chunk(const Communicator& comm, int64_t count, bool fill) {
  const Mesh mesh = Mesh::grid({comm.size()}, {"dp"});
  const Placement placements[] = {Shard{0}};
  const LocalBoxes boxes = local_boxes({count}, mesh, Dims{comm.rank()}, placements);
  const int64_t first = boxes.boxes.empty() ? 0 : boxes.boxes[0].offset[0];
  const TensorView local = fill ? counting(DType::kFloat32, boxes.local_shape, first)
                                : TensorView::without_data(DType::kFloat32, boxes.local_shape);
  return ShardedTensor::from_placements("t", local, {count}, mesh, placements, comm.rank());
}

// Saves by `writers` ranks with a communicator and by files, then reads the whole tensor and loads
// it by `readers` ranks.
void expect_chunks(int64_t count, int writers, int readers) {
  for (const bool files : {false, true}) {
    const Location location(memory_storage());
    run_ranks(writers, [&](Communicator comm) {
      StateDict state;
      state["t"] = chunk(comm, count, true);
      SaveOptions options = saving(files ? Communicator() : comm);
      if (files) options.by_files = ByFiles{comm.rank(), comm.size(), "a run of a test"};
      save(state, location, options);
    });
    const Checkpoint checkpoint = Checkpoint::open(location);
    EXPECT_TRUE(checkpoint.verify().ok());
    EXPECT_EQ(elements(checkpoint.read("t")), elements(counting(DType::kFloat32, {count})));
    run_ranks(readers, [&](Communicator comm) {
      StateDict wanted;
      wanted["t"] = chunk(comm, count, false);
      const StateDict loaded = load(wanted, location, loading(comm));
      const StateDict expected = [&] {
        StateDict state;
        state["t"] = chunk(comm, count, true);
        return state;
      }();
      EXPECT_EQ(elements(loaded.find("t")->get_if<ShardedTensor>()->data),
                elements(expected.find("t")->get_if<ShardedTensor>()->data));
    });
  }
}

TEST(Incident, FourThousandNinetySixElementsOverThirtyRanks) {
  expect_chunks(4096, 30, 30);
  expect_chunks(4096, 30, 7);
}

TEST(Incident, ShardsThatAreEmptyOnTheLastRanks) {
  expect_chunks(64, 30, 4);  // eight of the thirty ranks have no elements
  expect_chunks(64, 4, 30);
}

TEST(Incident, SizeSixOnFourRanksHasAZeroSizeChunk) {
  expect_chunks(6, 4, 4);
  expect_chunks(6, 4, 3);
}

TEST(Incident, TensorsWithoutDimsEverywhere) {
  const auto state_of = [](const Communicator& comm, bool fill) {
    const auto scalar = [&](DType dtype, int64_t number) {
      return fill ? counting(dtype, {}, number) : TensorView::without_data(dtype, {});
    };
    StateDict state, nested;
    state["plain"] = scalar(DType::kFloat32, 3);
    state["replica"] =
        ShardedTensor::from_rank_offsets("replica", scalar(DType::kInt64, 4), {}, {comm.rank()});
    state["layers"] = ShardedTensor::from_rank_offsets(
        "layers", scalar(DType::kInt64, 10 + comm.rank()), {{0, comm.rank(), comm.size()}}, {}, 1);
    nested["step"] = scalar(DType::kInt64, 5);
    state["optimizer"] = nested;
    return state;
  };
  const Location location(memory_storage());
  run_ranks(3, [&](Communicator comm) { save(state_of(comm, true), location, saving(comm)); });
  const Checkpoint checkpoint = Checkpoint::open(location);
  EXPECT_TRUE(checkpoint.verify().ok());
  EXPECT_EQ(elements(checkpoint.read("layers")), elements(counting(DType::kInt64, {3}, 10)));
  EXPECT_EQ(checkpoint.read("optimizer.step").shape, Dims{});
  run_ranks(3, [&](Communicator comm) {
    const StateDict loaded = load(state_of(comm, false), location, loading(comm));
    EXPECT_EQ(elements(*loaded.find("plain")->get_if<TensorView>()),
              elements(counting(DType::kFloat32, {}, 3)));
    EXPECT_EQ(elements(loaded.find("replica")->get_if<ShardedTensor>()->data),
              elements(counting(DType::kInt64, {}, 4)));
    EXPECT_EQ(elements(loaded.find("layers")->get_if<ShardedTensor>()->data),
              elements(counting(DType::kInt64, {}, 10 + comm.rank())));
    EXPECT_EQ(
        elements(
            *loaded.find("optimizer")->get_if<StateDict>()->find("step")->get_if<TensorView>()),
        elements(counting(DType::kInt64, {}, 5)));
  });
}

TEST(Incident, RowsLoadedAsColumnsReadWhatIsWantedAndNoMore) {
  const auto inner = memory_storage();
  const Dims shape{32, 16384};
  run_ranks(4, [&](Communicator comm) {
    StateDict state;
    state["w"] = ShardedTensor::from_rank_offsets(
        "w", counting(DType::kFloat32, {8, 16384}, comm.rank() * 8 * 16384),
        {{0, comm.rank(), comm.size()}});
    save(state, Location(inner), saving(comm));
  });
  std::atomic<uint64_t> bytes_read = 0;
  const auto disk = FaultDisk::create(inner, [&](const StorageCall& call) {
    const bool data = call.op == StorageOp::kRead && call.name.ends_with(".distcp");
    if (data) bytes_read += call.size;
    return FaultAction::pass();
  });
  const TensorView whole = counting(DType::kFloat32, shape);
  run_ranks(4, [&](Communicator comm) {
    StateDict wanted;
    wanted["w"] =
        ShardedTensor::from_rank_offsets("w", TensorView::without_data(DType::kFloat32, {32, 4096}),
                                         {{1, comm.rank(), comm.size()}});
    LoadOptions options = loading(comm);
    options.reading.two_phase = Reading::TwoPhase::kAlways;  // this storage has no page cache
    const StateDict loaded = load(wanted, Location(disk->storage(comm.rank())), options);
    EXPECT_EQ(elements(loaded.find("w")->get_if<ShardedTensor>()->data),
              elements(whole.narrow({{0, 4096 * comm.rank()}, {32, 4096}})));
  });
  EXPECT_GE(bytes_read, whole.bytes());
  EXPECT_LE(bytes_read, whole.bytes() + whole.bytes() / 20);
}

TEST(Incident, ATensorsSizeIsTheMetadatasAndAHoleAtItsEndIsNamed) {
  Metadata metadata;
  metadata.files = {"a.distcp"};
  StoredTensor tensor;
  tensor.key = "t";
  tensor.dtype = DType::kFloat32;
  tensor.shape = {8};
  tensor.chunks.push_back({{{0}, {6}}, {.file = 0, .offset = 0, .length = 500}});
  metadata.tensors.push_back(tensor);
  metadata.index();
  const auto format = torch_dist_format();
  const Location location(
      memory_storage({{".metadata", format->encode_index(metadata).front().bytes}}));
  const Checkpoint checkpoint = Checkpoint::open(location);
  EXPECT_EQ(checkpoint.metadata().find_tensor("t")->shape, Dims{8});
  try {
    checkpoint.read("t");
    FAIL() << "the last two elements are stored nowhere";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCoverage);
    EXPECT_THAT(error.what(), HasSubstr("[6:8]"));
    EXPECT_EQ(error.key(), "t");
  }
}

// ---- Folders ----

TEST(Incident, RanksThatSeeDifferentFoldersDoWhatOneOfThemSees) {
  const auto whole = memory_storage();
  save_rows(Location(whole), 2, 1);
  FileImage image = memory_image(*whole);
  image.erase(".metadata");  // the view of a rank whose network file system is late
  const auto late = memory_storage(image);
  const auto load_from = [&](const std::shared_ptr<Storage>& first,
                             const std::shared_ptr<Storage>& second) {
    return failures(2, [&](Communicator comm) {
      load(row_template(comm), Location(comm.rank() == 0 ? first : second), loading(comm));
    });
  };
  EXPECT_THAT(load_from(whole, late), Each(std::string()));
  EXPECT_THAT(load_from(late, whole), Each(HasSubstr("no checkpoint at")));
  const auto texts = failures(2, [&](Communicator comm) {
    save(row_state(comm, 2), Location(comm.rank() == 0 ? whole : late), saving(comm));
  });
  EXPECT_THAT(texts, Each(HasSubstr("a checkpoint exists at")));
}

TEST(Incident, AFailedSaveLeavesNoCachedState) {
  const auto disk_image = memory_storage();
  bool broken = true;
  const auto disk = FaultDisk::create(disk_image, [&](const StorageCall& call) {
    const bool fails = broken && call.op == StorageOp::kSync;
    return fails ? FaultAction::fail(EIO) : FaultAction::pass();
  });
  const Location location(disk->storage());
  const TensorView weights = counting(DType::kFloat32, {100}, 1);
  StateDict state;
  state["w"] = weights;
  EXPECT_THROW(save(state, location, saving(solo())), Error);
  EXPECT_THROW(Checkpoint::open(location), Error);
  broken = false;
  const TensorView next = counting(DType::kFloat32, {100}, 2);
  strided_copy(weights.strided_view(), next.strided_view());
  save(state, location, saving(solo()));  // it is not skipped as if the checkpoint existed
  EXPECT_EQ(elements(Checkpoint::open(location).read("w")), elements(next));
}

TEST(Incident, ACopiedFolderStaysValidAndIsNotTheOriginal) {
  const Folder original("original"), copy("copy");
  save_rows(original.path(), 3, 1);
  fs::copy(original.path(), copy.path(), fs::copy_options::recursive);
  expect_rows(copy.path(), 1, 3);
  EXPECT_TRUE(Checkpoint::open(copy.path()).verify().ok());
  save_rows(copy.path(), 2, 5, true);
  expect_rows(copy.path(), 5, 2);
  expect_rows(original.path(), 1, 3);
  EXPECT_TRUE(Checkpoint::open(original.path()).verify().ok());
}

TEST(Incident, AFolderWithLeftoversAndForeignFilesIsSavedInto) {
  const Folder folder("leftovers");
  save_rows(folder.path(), 4, 1);
  // As if the save was killed before it published.
  fs::remove(folder.path() / ".metadata");
  for (const std::string& name : posix_storage(folder.path().string())->list(".tilestone/")) {
    if (!name.ends_with(".manifest")) continue;
    std::ofstream(folder.path() / (name.substr(0, name.rfind('.')) + ".begun"));
  }
  fs::create_directories(folder.path() / "logs");
  std::ofstream(folder.path() / "logs" / "train.log") << "mine";
  const auto texts = failures(
      2, [&](Communicator comm) { save(row_state(comm, 7), folder.path(), saving(comm)); });
  EXPECT_THAT(texts, Each(std::string()));
  expect_rows(folder.path(), 7, 2);
  EXPECT_TRUE(fs::exists(folder.path() / "logs" / "train.log"));
  const auto names = posix_storage(folder.path().string())->list();
  EXPECT_EQ(std::count_if(names.begin(), names.end(),
                          [](const std::string& name) { return name.ends_with(".distcp"); }),
            2);
}

TEST(Incident, RanksThatMakeOneDirectoryAtOnceAllSucceed) {
  const Folder folder("mkdir");
  for (int round = 0; round < 20; ++round) {
    const fs::path root = folder.path() / std::to_string(round) / "a" / "b";
    const auto texts = failures(8, [&](Communicator comm) {
      all_arrive(comm, Deadline::after(std::chrono::seconds(60)));
      posix_storage(root.string())->directories()->make("c/d");
    });
    EXPECT_THAT(texts, Each(std::string()));
    EXPECT_TRUE(fs::is_directory(root / "c" / "d"));
  }
}

TEST(Incident, ACheckpointThatCantBeWrittenToLoads) {
  const auto inner = memory_storage();
  save_rows(Location(inner), 2, 1);
  const auto disk = FaultDisk::create(inner, [](const StorageCall& call) {
    const bool writes = changes_storage(call.op) || call.op == StorageOp::kLock;
    return writes ? FaultAction::fail(EROFS) : FaultAction::pass();
  });
  const Location location(disk->storage());
  expect_rows(location, 1, 2);
  EXPECT_TRUE(Checkpoint::open(location).verify().ok());
  run_ranks(2, [&](Communicator comm) {
    const StateDict loaded = load(row_template(comm), location, loading(comm));
    EXPECT_EQ(elements(loaded.find("w")->get_if<ShardedTensor>()->data),
              elements(counting(DType::kFloat32, {1, 8}, 1 + 8 * comm.rank())));
  });
  const auto texts = failures(
      2, [&](Communicator comm) { save(row_state(comm, 2), location, saving(comm, true)); });
  EXPECT_THAT(texts, Each(HasSubstr("Read-only file system")));
  expect_rows(location, 1, 2);
}

}  // namespace tilestone::incidents_test
