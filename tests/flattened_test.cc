// Tensors that Megatron-Core up to 0.15 stores flattened are read in their original shapes. The
// tests use other grids and slices than tests/golden, all ways to load, and damaged items.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <utility>

#include "tests/golden.h"
#include "tests/random_layout.h"
#include "tilestone/base/error.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/format/archive/pickle_writer_internal.h"
#include "tilestone/format/torch_dist/checkpoint_testing.h"
#include "tilestone/format/torch_dist/torch_dist.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::flattened_test {

using tests::Fill;
using tests::LayoutKind;
using tests::Random;
using tests::Reference;

// A tensor and the regular grid of its local shards.
struct Sharded {
  Reference tensor;
  Dims counts;
};

OpenOptions small_options() {
  OpenOptions options;
  options.resources.threads = 1;
  options.resources.buffer_bytes = 1u << 20;
  return options;
}

// Adds the local shards as they are stored: flattened, and cut at random into up to five slices
// each.
void add_slices(const Sharded& sharded, Random& random, StateDict& state) {
  const TensorView& whole = sharded.tensor.all;
  const size_t dims = whole.shape.size();
  Box shard = Box::whole(whole.shape);
  for (size_t d = 0; d < dims; ++d) shard.shape[d] /= sharded.counts[d];
  Dims stored = sharded.counts;
  stored.push_back(shard.numel());
  for (int64_t number = 0; number < numel(sharded.counts); ++number) {
    Box slice{Dims(dims + 1, 0), Dims(dims + 1, 1)};
    int64_t rest = number;
    for (size_t d = dims; d-- > 0; rest /= sharded.counts[d]) {
      slice.offset[d] = rest % sharded.counts[d];
      shard.offset[d] = slice.offset[d] * shard.shape[d];
    }
    const Bytes flat = elements(whole.narrow(shard));
    std::vector<int64_t> cuts{0, shard.numel()};
    for (uint64_t i = random() % 5; i > 0; --i) {
      cuts.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(shard.numel() + 1)));
    }
    std::sort(cuts.begin(), cuts.end());
    for (size_t i = 1; i < cuts.size(); ++i) {
      slice.offset[dims] = cuts[i - 1];
      slice.shape[dims] = cuts[i] - cuts[i - 1];
      TensorView data = TensorView::allocate(whole.dtype, slice.shape);
      const uint64_t first = static_cast<uint64_t>(cuts[i - 1]) * itemsize(whole.dtype);
      std::copy_n(flat.begin() + static_cast<ptrdiff_t>(first), data.bytes(), data.data);
      state[std::to_string(state.size())] =
          ShardedTensor::from_box(sharded.tensor.key, std::move(data), stored, slice);
    }
  }
}

// `.metadata` with the field in which Megatron-Core records original shapes.
Bytes with_originals(const Bytes& metadata, const std::map<std::string, Dims>& originals) {
  archive::PickleWriter out(4);
  const size_t header = out.size();
  out.string("mcore_data");
  out.op(archive::op::kEmptyDict);
  out.op(archive::op::kMark);
  for (const auto& [key, shape] : originals) {
    out.string(key);
    out.op(archive::op::kEmptyDict);
    out.op(archive::op::kMark);
    out.string("nd_reformulated_orig_global_shape");
    out.int_tuple(shape);
    out.op(archive::op::kSetItems);
  }
  out.op(archive::op::kSetItems);
  const Bytes field = std::move(out).finish();
  Bytes changed = metadata;  // ends with SETITEMS BUILD STOP
  changed.insert(changed.end() - 3, field.begin() + static_cast<ptrdiff_t>(header),
                 field.end() - 1);
  return changed;
}

FileImage flattened(const std::vector<Sharded>& tensors, Random& random) {
  StateDict state;
  std::map<std::string, Dims> originals;
  for (const Sharded& sharded : tensors) {
    add_slices(sharded, random, state);
    originals.emplace(sharded.tensor.key, sharded.tensor.all.shape);
  }
  FileImage image = torch_dist::write_checkpoint(*torch_dist_format(), state, "stock");
  image[".metadata"] = with_originals(image[".metadata"], originals);
  return image;
}

std::vector<Sharded> random_tensors(Random& random) {
  constexpr DType kDTypes[] = {DType::kFloat32, DType::kInt64, DType::kUInt8, DType::kBFloat16};
  std::vector<Sharded> tensors;
  for (const char* key : {"a", "b", "c"}) {
    Dims counts, shape;
    for (uint64_t d = 1 + random() % 4; d > 0; --d) {
      counts.push_back(static_cast<int64_t>(1 + random() % 3));
      shape.push_back(counts.back() * static_cast<int64_t>(1 + random() % 5));
    }
    tensors.push_back({{key, counting(kDTypes[random() % 4], shape)}, counts});
  }
  return tensors;
}

Box random_box(const Dims& shape, Random& random) {
  Box box = Box::whole(shape);
  for (size_t d = 0; d < box.rank(); ++d) {
    box.offset[d] = static_cast<int64_t>(random() % static_cast<uint64_t>(shape[d]));
    box.shape[d] =
        static_cast<int64_t>(1 + random() % static_cast<uint64_t>(shape[d] - box.offset[d]));
  }
  return box;
}

void load_by_ranks(const std::vector<Sharded>& tensors, const Location& location, uint64_t seed) {
  run_ranks(static_cast<int>(1 + seed % 4), [&](Communicator comm) {
    StateDict wanted;
    for (const Sharded& sharded : tensors) {
      Random random(seed);
      for (const LayoutKind kind : {LayoutKind::kFlat, tests::random_kind(random)}) {
        for (ShardedTensor& tensor : tests::random_layout(sharded.tensor, kind, random, comm.rank(),
                                                          comm.size(), Fill::kNone)) {
          wanted[std::to_string(wanted.size())] = std::move(tensor);
        }
      }
    }
    LoadOptions options;
    options.comm = comm;
    options.resources.threads = 1;
    options.resources.buffer_bytes = 1u << 20;
    if (seed % 2 == 0) options.reading.two_phase = Reading::TwoPhase::kAlways;
    const StateDict loaded = load(wanted, location, options);
    for (const auto& [name, node] : loaded.entries()) {
      const auto* tensor = node.get_if<ShardedTensor>();
      ASSERT_NE(tensor, nullptr);
      const auto from = std::find_if(tensors.begin(), tensors.end(), [&](const Sharded& sharded) {
        return sharded.tensor.key == tensor->key;
      });
      for (const Piece& piece : tensor->pieces) {
        EXPECT_EQ(elements(piece.data), elements(from->tensor.all.narrow(piece.box)))
            << tensor->key << " " << to_string(piece.box);
      }
    }
  });
}

TEST(Flattened, TensorsOfAnyGridAndSlicesAreReadInAnyParts) {
  for (uint64_t seed = 1; seed <= 60 && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    const std::vector<Sharded> tensors = random_tensors(random);
    const Location location(memory_storage(flattened(tensors, random)));
    const Checkpoint checkpoint = Checkpoint::open(location, small_options());
    for (const Sharded& sharded : tensors) {
      const auto& [key, all] = sharded.tensor;
      SCOPED_TRACE(key + " " + to_string(all.shape) + " in " + to_string(sharded.counts));
      EXPECT_EQ(checkpoint.metadata().find_tensor(key)->shape, all.shape);
      EXPECT_EQ(elements(checkpoint.read(key)), elements(all));
      for (int i = 0; i < 5; ++i) {
        const Box box = random_box(all.shape, random);
        EXPECT_EQ(elements(checkpoint.read(key, box)), elements(all.narrow(box)));
      }
    }
    load_by_ranks(tensors, location, seed);
  }
}

TEST(Flattened, ATensorIsConvertedOnTheWay) {
  Random random(1);
  const Sharded sharded{{"w", counting(DType::kInt16, {6, 4, 5})}, {1, 2, 1}};
  const Location location(memory_storage(flattened({sharded}, random)));
  LoadOptions options;
  options.cast = true;
  const Box box{{1, 1, 0}, {4, 3, 5}};
  StateDict wanted;
  wanted["w"] = ShardedTensor::from_box("w", TensorView::without_data(DType::kInt64, box.shape),
                                        {6, 4, 5}, box);
  const StateDict loaded = load(wanted, location, options);
  EXPECT_EQ(elements(loaded.find("w")->get_if<ShardedTensor>()->data),
            elements(counting(DType::kInt64, {6, 4, 5}).narrow(box)));
}

TEST(Flattened, OnlyTheRangesOfWantedRowsAreRead) {
  Random random(1);
  const Sharded sharded{{"w", counting(DType::kFloat32, {1024, 512})}, {1, 2}};
  uint64_t bytes = 0;
  const auto disk =
      FaultDisk::create(memory_storage(flattened({sharded}, random)), [&](const StorageCall& call) {
        if (call.op == StorageOp::kRead && call.name != ".metadata") bytes += call.size;
        return FaultAction::pass();
      });
  const Checkpoint checkpoint = Checkpoint::open(Location(disk->storage()), small_options());
  const Box rows{{300, 0}, {4, 512}};
  EXPECT_EQ(elements(checkpoint.read("w", rows)), elements(sharded.tensor.all.narrow(rows)));
  // Of 2 MiB. Most of this is read to find the structure of two items or more.
  EXPECT_LT(bytes, 200u << 10);
}

TEST(Flattened, AnImpossibleOriginalShapeIsRefusedWithTheKey) {
  Random random(1);
  const Sharded sharded{{"layers.w", counting(DType::kInt16, {4, 6})}, {2, 1}};
  StateDict state;
  add_slices(sharded, random, state);
  const FileImage plain = torch_dist::write_checkpoint(*torch_dist_format(), state, "stock");
  const auto open_with = [&](const std::map<std::string, Dims>& originals) {
    FileImage changed = plain;
    changed[".metadata"] = with_originals(plain.at(".metadata"), originals);
    return Checkpoint::open(Location(memory_storage(changed)), small_options());
  };
  for (const Dims& shape : {Dims{4, 7}, Dims{2, 6}, Dims{24}, Dims{3, 8}}) {
    expect_error([&] { open_with({{"layers.w", shape}}); }, ErrorCode::kCorrupt, "layers.w");
  }
  EXPECT_EQ(open_with({{"layers.w", {4, 6}}}).read("layers.w").shape, (Dims{4, 6}));
  // Without an original shape the tensor has its stored shape.
  EXPECT_EQ(open_with({{"removed", {4, 6}}}).read("layers.w").shape, (Dims{2, 1, 12}));
}

uint64_t middle_of_record(const Bytes& file, const StoredTensor& tensor, uint32_t chunk) {
  const ItemLocation& at = tensor.chunks[chunk].at;
  std::vector<ByteView> probed;
  for (const ProbeRange& range : torch_dist_format()->probe(at)) {
    probed.push_back(ByteView(file).subspan(at.offset + range.offset, range.size));
  }
  const StoredPayload payload =
      torch_dist_format()->parse_tensor(tensor, tensor.chunks[chunk], at, probed);
  return at.offset + payload.record_offset + payload.record_size / 2;
}

void load_whole_by_ranks(const StoredTensor& tensor, const FileImage& image) {
  run_ranks(2, [&](Communicator comm) {
    LoadOptions options;
    options.comm = comm;
    options.reading.two_phase = Reading::TwoPhase::kAlways;
    StateDict wanted;
    wanted["t"] =
        ShardedTensor::from_box(tensor.key, TensorView::without_data(tensor.dtype, tensor.shape),
                                tensor.shape, Box::whole(tensor.shape));
    load(wanted, Location(memory_storage(image)), options);
  });
}

TEST(Flattened, AFlippedBitInAnItemIsFoundByAReadAndByRanksThatReadForOneAnother) {
  const FileImage image = image_of(golden("megatron-core-0.13.1/flat-w2"));
  const Checkpoint sound = Checkpoint::open(Location(memory_storage(image)));
  size_t items = 0;
  for (const StoredTensor& tensor : sound.metadata().tensors) {
    if (!tensor.key.starts_with("flat.")) continue;
    for (uint32_t c = 0; c < tensor.chunks.size(); ++c) {
      if (tensor.first_of_item(c) != c) continue;
      SCOPED_TRACE(tensor.key + " " + to_string(tensor.chunks[c].box));
      FileImage damaged = image;
      Bytes& file = damaged[sound.metadata().files[tensor.chunks[c].at.file]];
      file[middle_of_record(file, tensor, c)] ^= std::byte{1};
      const Checkpoint checkpoint = Checkpoint::open(Location(memory_storage(damaged)));
      expect_error([&] { checkpoint.read(tensor.key); }, ErrorCode::kCorrupt, tensor.key);
      expect_error([&] { load_whole_by_ranks(tensor, damaged); }, ErrorCode::kCorrupt, tensor.key);
      const VerifyReport report = checkpoint.verify();
      ASSERT_EQ(report.damages.size(), 1u);
      EXPECT_EQ(report.damages[0].key, tensor.key);
      ++items;
    }
  }
  EXPECT_GT(items, 10u);
}

TEST(Flattened, ATensorThatIsReadAndSavedAgainIsTheOriginalOne) {
  const Checkpoint old = Checkpoint::open(Location(golden("megatron-core-0.9.0/flat-w4")));
  StateDict state;
  for (const StoredTensor& tensor : old.metadata().tensors) {
    state[tensor.key] = ShardedTensor::from_box(tensor.key, old.read(tensor.key), tensor.shape,
                                                Box::whole(tensor.shape));
  }
  const Location location(memory_storage());
  save(state, location);
  const Checkpoint converted = Checkpoint::open(location);
  for (const StoredTensor& tensor : old.metadata().tensors) {
    EXPECT_EQ(converted.read(tensor.key).shape, tensor.shape);
    EXPECT_EQ(elements(converted.read(tensor.key)), elements(old.read(tensor.key))) << tensor.key;
  }
  EXPECT_TRUE(converted.verify().ok());
}

}  // namespace tilestone::flattened_test
