// Loads that convert what is stored: dtypes, shapes, compressed items.
#include "tilestone/engine/load/load.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zstd.h>

#include <atomic>
#include <cmath>
#include <cstring>

#include "tilestone/base/error_testing.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/format/format.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"

namespace tilestone::load_test {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;

LoadOptions loading(const Communicator& comm, bool cast = false) {
  LoadOptions options;
  options.comm = comm;
  options.resources.buffer_bytes = 1u << 20;
  options.resources.threads = 2;
  options.cast = cast;
  return options;
}

// ---- dtypes ----

constexpr int64_t kCount = 300000;  // more than fits into one buffer

float fraction(int64_t i) { return static_cast<float>(i) / 7 - 1000; }

// "f": float32, one half on each of two ranks; "i": int64.
Location save_numbers() {
  const Location location(memory_storage());
  run_ranks(2, [&](Communicator comm) {
    const TensorView half = TensorView::allocate(DType::kFloat32, {kCount / 2});
    for (int64_t i = 0; i < kCount / 2; ++i) {
      reinterpret_cast<float*>(half.data)[i] = fraction(comm.rank() * (kCount / 2) + i);
    }
    StateDict state;
    state["f"] = ShardedTensor::from_rank_offsets("f", half, {{0, comm.rank(), 2}});
    state["i"] = counting(DType::kInt64, {1000}, -500);
    SaveOptions options;
    options.comm = comm;
    save(state, location, options);
  });
  return location;
}

// The nearest bfloat16 of a finite number, ties to even.
uint16_t nearest_bfloat16(float number) {
  uint32_t bits = 0;
  std::memcpy(&bits, &number, sizeof bits);
  const uint32_t odd = bits >> 16 & 1;
  return static_cast<uint16_t>((bits + 0x7fff + odd) >> 16);
}

TEST(Cast, Float32BecomesBFloat16OnEveryRank) {
  const Location location = save_numbers();
  run_ranks(3, [&](Communicator comm) {
    StateDict wanted;
    wanted["f"] = ShardedTensor::from_rank_offsets(
        "f", TensorView::without_data(DType::kBFloat16, {kCount / 3}), {{0, comm.rank(), 3}});
    const StateDict loaded = load(wanted, location, loading(comm, true));
    const TensorView& data = loaded.find("f")->get_if<ShardedTensor>()->data;
    ASSERT_EQ(data.dtype, DType::kBFloat16);
    for (int64_t i = 0; i < kCount / 3; ++i) {
      const float stored = fraction(comm.rank() * (kCount / 3) + i);
      ASSERT_EQ(reinterpret_cast<const uint16_t*>(data.data)[i], nearest_bfloat16(stored)) << i;
    }
  });
}

TEST(Cast, Int64BecomesFloat64InPlace) {
  const Location location = save_numbers();
  const TensorView mine = TensorView::allocate(DType::kFloat64, {1000});
  StateDict wanted;
  wanted["i"] = mine;
  load(wanted, location, loading(Communicator(), true));
  for (int64_t i = 0; i < 1000; ++i) {
    EXPECT_EQ(reinterpret_cast<const double*>(mine.data)[i], static_cast<double>(i - 500));
  }
}

TEST(Cast, AnotherDtypeIsRefusedOnEveryRankUnlessAskedFor) {
  const Location location = save_numbers();
  const auto texts = failures(2, [&](Communicator comm) {
    StateDict wanted;
    const DType dtype = comm.rank() == 1 ? DType::kBFloat16 : DType::kFloat32;
    wanted["f"] = TensorView::without_data(dtype, {kCount});
    load(wanted, location, loading(comm));
  });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("float32"), HasSubstr("bfloat16"), HasSubstr("is wanted"),
                                HasSubstr("key f"), HasSubstr("rank 1"),
                                HasSubstr("cast = true converts the dtype"))));
}

// ---- shapes ----

ShardedTensor rows_of(int64_t rows, int64_t rank, int64_t ranks, bool allow) {
  ShardedTensor tensor = ShardedTensor::from_rank_offsets(
      "t", counting(DType::kFloat32, {rows / ranks, 5}, 1 << 20), {{0, rank, ranks}});
  tensor.allow_shape_mismatch = allow;
  return tensor;
}

Location save_six_rows() {
  const Location location(memory_storage());
  StateDict state;
  state["t"] = counting(DType::kFloat32, {6, 5}, 1);
  save(state, location);
  return location;
}

TEST(ShapeMismatch, WhatTheStoredTensorHasMoreIsStripped) {
  const Location location = save_six_rows();
  run_ranks(2, [&](Communicator comm) {
    StateDict wanted;
    wanted["t"] = rows_of(4, comm.rank(), 2, true);
    const StateDict loaded = load(wanted, location, loading(comm));
    EXPECT_EQ(elements(loaded.find("t")->get_if<ShardedTensor>()->data),
              elements(counting(DType::kFloat32, {2, 5}, 1 + 10 * comm.rank())));
  });
}

TEST(ShapeMismatch, WhatTheStoredTensorLacksIsZeroFilled) {
  const Location location = save_six_rows();
  run_ranks(3, [&](Communicator comm) {
    StateDict wanted;
    wanted["t"] = rows_of(12, comm.rank(), 3, true);  // memory that contains other numbers
    const StateDict loaded = load(wanted, location, loading(comm));
    const TensorView& data = loaded.find("t")->get_if<ShardedTensor>()->data;
    for (int64_t i = 0; i < 4 * 5; ++i) {
      const int64_t place = comm.rank() * 20 + i;
      const float expected = place < 30 ? static_cast<float>(1 + place) : 0;
      EXPECT_EQ(reinterpret_cast<const float*>(data.data)[i], expected) << "element " << place;
    }
  });
}

TEST(ShapeMismatch, IsRefusedOnEveryRankUnlessTheTensorAllowsIt) {
  const Location location = save_six_rows();
  const auto texts = failures(2, [&](Communicator comm) {
    StateDict wanted;
    if (comm.rank() == 1) wanted["t"] = rows_of(4, 0, 1, false);
    load(wanted, location, loading(comm));
  });
  EXPECT_THAT(texts, Each(Mentions("[6, 5]", "[4, 5]", "wanted", "key t", "rank 1",
                                   "allow_shape_mismatch")));
}

// ---- compressed items ----

Bytes compressed(ByteView plain) {
  Bytes packed(ZSTD_compressBound(plain.size()));
  packed.resize(ZSTD_compress(packed.data(), packed.size(), plain.data(), plain.size(), 3));
  return packed;
}

// The same checkpoint as a writer with stream.zstd/1 makes it: every item is compressed as a whole,
// and there is no manifest.
FileImage with_compressed_items(const FileImage& image) {
  const Checkpoint plain = Checkpoint::open(Location(memory_storage(image)));
  Metadata metadata = plain.metadata();
  FileImage out;
  const auto move_item = [&](ItemLocation& at) {
    Bytes& file = out[metadata.files[at.file]];
    const std::string& old = plain.metadata().files[at.file];
    const ByteView item = ByteView(image.at(old)).subspan(at.offset, at.length);
    const Bytes packed = compressed(item);
    at = {at.file, Codec::kZstd, file.size(), packed.size(), {}};
    file.insert(file.end(), packed.begin(), packed.end());
  };
  for (size_t i = 0; i < metadata.files.size(); ++i) {
    metadata.files[i] = "__" + std::to_string(i) + "_0.distcp";  // PyTorch's file names
  }
  for (StoredTensor& tensor : metadata.tensors) {
    for (StoredChunk& chunk : tensor.chunks) move_item(chunk.at);
  }
  for (StoredObject& object : metadata.objects) move_item(object.at);
  metadata.save_id.clear();
  out[".metadata"] = plain.format().encode_index(metadata).front().bytes;
  return out;
}

FileImage compressed_rows(int ranks) {
  const auto storage = memory_storage();
  run_ranks(ranks, [&](Communicator comm) {
    SaveOptions options;
    options.comm = comm;
    save(row_state(comm, 100), Location(storage), options);
  });
  return with_compressed_items(memory_image(*storage));
}

TEST(CompressedItems, AreReadAndVerifiedLikeOthers) {
  const Location location(memory_storage(compressed_rows(3)));
  const Checkpoint checkpoint = Checkpoint::open(location);
  EXPECT_EQ(checkpoint.metadata().find_tensor("w")->chunks[0].at.codec, Codec::kZstd);
  expect_rows(location, 100, 3);
  const VerifyReport report = checkpoint.verify();
  EXPECT_TRUE(report.ok()) << report.damages.front().problem;
  EXPECT_EQ(report.items, 5u);
}

TEST(CompressedItems, AreLoadedIntoOtherBoxesAndDtypes) {
  const Location location(memory_storage(compressed_rows(3)));
  run_ranks(2, [&](Communicator comm) {
    StateDict wanted;
    wanted["w"] = ShardedTensor::from_rank_offsets(
        "w", TensorView::without_data(DType::kFloat64, {3, 4}), {{1, comm.rank(), 2}});
    wanted["p"] = TensorView::without_data(DType::kInt64, {3});
    wanted["step"] = nullptr;
    const StateDict loaded = load(wanted, location, loading(comm, true));
    const TensorView& w = loaded.find("w")->get_if<ShardedTensor>()->data;
    for (int64_t i = 0; i < 12; ++i) {
      const int64_t expected = 100 + i / 4 * 8 + comm.rank() * 4 + i % 4;
      EXPECT_EQ(reinterpret_cast<const double*>(w.data)[i], static_cast<double>(expected));
    }
    EXPECT_EQ(elements(*loaded.find("p")->get_if<TensorView>()),
              elements(counting(DType::kInt64, {3}, 100)));
    EXPECT_EQ(*loaded.find("step")->get_if<Value>(), Value(int64_t{100}));
  });
}

TEST(CompressedItems, DamageInOneIsNamedWithItsKeyAndFile) {
  FileImage image = compressed_rows(1);
  const Checkpoint checkpoint = Checkpoint::open(Location(memory_storage(image)));
  const ItemLocation at = checkpoint.metadata().find_tensor("w")->chunks[0].at;
  const std::string file = checkpoint.metadata().files[at.file];
  image[file][at.offset + at.length / 2] ^= std::byte{0x55};
  const Location damaged(memory_storage(image));
  const VerifyReport report = Checkpoint::open(damaged).verify();
  ASSERT_EQ(report.damages.size(), 1u);
  EXPECT_EQ(report.damages[0].key, "w");
  EXPECT_EQ(report.damages[0].file, file);
  EXPECT_THAT(
      failures(1, [&](Communicator comm) { load(row_template(comm), damaged, loading(comm)); }),
      Each(AllOf(HasSubstr("key w"), HasSubstr(file))));
}

// ---- number of reads ----

// Values and small tensors, one item after another, without a manifest that says where the elements
// are.
TEST(Load, SmallItemsOfOneFileAreReadTogether) {
  constexpr int kItems = 60;
  StateDict state, wanted;
  for (int i = 0; i < kItems; ++i) {
    state["v" + std::to_string(i)] = Value(i);
    wanted["v" + std::to_string(i)] = Value();
    state["t" + std::to_string(i)] = counting(DType::kInt32, {10}, i);
    wanted["t" + std::to_string(i)] = TensorView::without_data(DType::kInt32, {10});
  }
  const auto storage = memory_storage();
  save(state, Location(storage));
  FileImage image = memory_image(*storage);
  std::erase_if(image, [](const auto& file) { return file.first.ends_with(".manifest"); });
  std::atomic<int> reads = 0;
  const auto disk = FaultDisk::create(memory_storage(image), [&](const StorageCall& call) {
    reads += call.op == StorageOp::kRead && call.name.ends_with(".distcp");
    return FaultAction::pass();
  });
  const StateDict loaded = load(wanted, Location(disk->storage()));
  EXPECT_EQ(elements(*loaded.find("t7")->get_if<TensorView>()),
            elements(counting(DType::kInt32, {10}, 7)));
  EXPECT_LE(reads, 6);  // of objects, of items' headers, and of elements
}

// In a store that answers each request alone, requests side by side are what is fast.
TEST(Load, ColumnsThatAreSmallAreReadFromAStoreByARequestOfEachThread) {
  constexpr int kThreads = 4;
  const auto storage = memory_objects();
  StateDict state, wanted;
  state["w"] = counting(DType::kInt32, {1024, 1024});
  wanted["w"] = ShardedTensor::from_rank_offsets(
      "w", TensorView::without_data(DType::kInt32, {1024, 512}), {{1, 1, 2}});
  save(state, Location(storage));
  std::atomic<int> large = 0;
  const auto disk = FaultDisk::create(storage, [&](const StorageCall& call) {
    large += call.op == StorageOp::kRead && call.size > 64u << 10;
    return FaultAction::pass();
  });
  LoadOptions options;
  options.resources.threads = kThreads;
  const StateDict loaded = load(wanted, Location(disk->storage()), options);
  const TensorView& data = loaded.find("w")->get_if<ShardedTensor>()->data;
  EXPECT_EQ(reinterpret_cast<const int32_t*>(data.data)[512], 1024 + 512);
  EXPECT_GE(large, kThreads);
}

}  // namespace tilestone::load_test
