// Saves and loads in Megatron-Core's dialect over torch_dist.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>

#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/format/archive/torch_archive.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/known/known.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::megatron_test {

using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;

SaveOptions options_of(const Communicator& comm) {
  SaveOptions options;
  options.comm = comm;
  options.dialect = megatron_dialect();
  options.resources.buffer_bytes = 1u << 20;
  return options;
}

// row_state(), and one object per rank.
StateDict state_of(const Communicator& comm) {
  StateDict state = row_state(comm, 1);
  state["rng"] = ShardedObject::make("rng", Value(comm.rank()), {comm.size()}, {comm.rank()});
  return state;
}

std::shared_ptr<Storage> saved(int ranks) {
  const auto storage = memory_storage();
  run_ranks(ranks,
            [&](Communicator comm) { save(state_of(comm), Location(storage), options_of(comm)); });
  return storage;
}

Value common_of_rows() {
  return Value::dict({{"p", Value(counting(DType::kInt64, {3}, 1))}, {"step", 1}});
}

TEST(MegatronSave, LeavesTheFilesOfEveryVersion) {
  const auto storage = saved(2);
  const FileImage image = memory_image(*storage);
  EXPECT_TRUE(image.contains(".metadata"));
  EXPECT_EQ(read_torch_archive(image.at("common.pt")), common_of_rows());
  EXPECT_THAT(std::string(as_text(image.at("metadata.json"))), HasSubstr("\"torch_dist\""));
  // Without common.pt and metadata.json it is a plain PyTorch checkpoint, which still has the
  // objects that Megatron-Core reads from version 0.19 on.
  FileImage newer = image;
  newer.erase("common.pt");
  for (auto it = newer.begin(); it != newer.end();) {
    it = it->first.ends_with(".manifest") || it->first == "metadata.json" ? newer.erase(it)
                                                                          : std::next(it);
  }
  const Checkpoint plain = Checkpoint::open(Location(memory_storage(newer)));
  EXPECT_EQ(plain.dialect().name(), "pytorch");
  EXPECT_EQ(plain.read_object("common_state/shard_0_1"), Value::list({common_of_rows()}));
  EXPECT_EQ(plain.read_object("rng/shard_1_2"), Value::list({1}));
}

TEST(MegatronLoad, UnderAnotherWorldGivesEntitiesAndTheCommonState) {
  const auto storage = saved(4);
  run_ranks(2, [&](Communicator comm) {
    StateDict wanted;
    wanted["w"] = ShardedTensor::from_rank_offsets(
        "w", TensorView::without_data(DType::kFloat32, {2, 8}), {{0, comm.rank(), 2}});
    wanted["rng"] = ShardedObject::make("rng", nullptr, {4}, {comm.rank() + 2});
    LoadOptions options;
    options.comm = comm;
    const StateDict loaded = load(wanted, Location(storage), options);
    EXPECT_EQ(elements(loaded.find(std::string("w"))->get_if<ShardedTensor>()->data),
              elements(counting(DType::kFloat32, {2, 8}, 1 + 16 * comm.rank())));
    EXPECT_EQ(loaded.find(std::string("rng"))->get_if<ShardedObject>()->data,
              Value(comm.rank() + 2));
    EXPECT_EQ(*loaded.find(std::string("step"))->get_if<Value>(), Value(1));
    EXPECT_EQ(*loaded.find(std::string("p"))->get_if<Value>(),
              Value(counting(DType::kInt64, {3}, 1)));
  });
}

TEST(MegatronCheckpoint, HidesTheObjectOfTheCommonStateFromKeys) {
  const Checkpoint checkpoint = Checkpoint::open(Location(saved(2)));
  EXPECT_THAT(checkpoint.keys(), ElementsAre("rng/shard_0_2", "rng/shard_1_2", "w"));
  EXPECT_EQ(checkpoint.common(), common_of_rows());
  EXPECT_EQ(checkpoint.read_object("rng/shard_1_2"), Value(1));
  EXPECT_EQ(checkpoint.metadata().dialect, "megatron");
  // The dialect's own keys need not be requested, even below `complete`.
  LoadOptions options;
  options.complete = {Path{std::string("common_state")}};
  StateDict wanted;
  EXPECT_NO_THROW(load(wanted, Location(saved(1)), options));
}

TEST(MegatronCheckpoint, ReadsTheCommonStateOfTheObjectWhereThereIsNoFile) {
  FileImage image = memory_image(*saved(2));
  image.erase("common.pt");
  std::erase_if(image, [](const auto& file) { return file.first.ends_with(".manifest"); });
  const Checkpoint checkpoint = Checkpoint::open(Location(memory_storage(image)));
  EXPECT_EQ(checkpoint.common(), common_of_rows());
  EXPECT_THAT(checkpoint.keys(), ElementsAre("rng/shard_0_2", "rng/shard_1_2", "w"));
}

TEST(MegatronLoad, OfObjectsByGridAKeyIsThereOrRequestedAsSoonAsAPartOfItsGridIs) {
  const auto storage = saved(2);  // "w", and "rng" with two parts
  run_ranks(2, [&](Communicator comm) {
    LoadOptions options;
    options.comm = comm;
    options.differences.not_in_checkpoint = Differences::Policy::kReport;
    options.differences.not_requested = Differences::Policy::kReport;
    const auto report_of = [&](const std::string& key, bool by_grid) {
      StateDict wanted;
      if (comm.rank() == 1) wanted["o"] = ShardedObject::make(key, nullptr, {2}, {0});
      options.objects_by_grid = by_grid;
      LoadReport report;
      options.differences.report = &report;
      load(wanted, Location(storage), options);
      return report;
    };
    EXPECT_THAT(report_of("rng", true).not_requested, ElementsAre("w"));
    EXPECT_THAT(report_of("rng", false).not_requested, ElementsAre("rng/shard_1_2", "w"));
    EXPECT_THAT(report_of("new", true).not_requested, ElementsAre("rng", "w"));
    EXPECT_THAT(report_of("new", true).not_in_checkpoint, ElementsAre("new"));
    EXPECT_THAT(report_of("new", false).not_in_checkpoint, ElementsAre("new/shard_0_2"));
  });
  LoadOptions options;
  options.differences.not_in_checkpoint = Differences::Policy::kIgnore;
  options.objects_by_grid = true;
  StateDict wanted;
  wanted["o"] = ShardedObject::make("rng", nullptr, {3}, {0});
  expect_error([&] { load(wanted, Location(storage), options); }, ErrorCode::kNotFound,
               "rng/shard_0_3");
  EXPECT_THAT(failures(2,
                       [&](Communicator comm) {
                         LoadOptions differing;
                         differing.comm = comm;
                         differing.objects_by_grid = comm.rank() == 1;
                         load(StateDict(), Location(storage), differing);
                       }),
              Each(HasSubstr("the ranks don't agree on objects_by_grid")));
}

TEST(MegatronLoad, WhatIsInNeitherPlaceIsNamedOrKeepsTheTemplates) {
  const auto storage = saved(2);
  const auto load_with = [&](Differences::Policy policy, LoadReport& report) {
    LoadOptions options;
    options.differences.not_in_checkpoint = policy;
    StateDict wanted, deeper;
    deeper["value"] = 7;
    deeper["tensor"] = counting(DType::kInt64, {2}, 40);
    wanted["step"] = nullptr;
    wanted["new"] = std::move(deeper);
    wanted["rng"] = ShardedObject::make("rng", "own", {3}, {0});
    options.differences.report = &report;
    return load(wanted, Location(storage), options);
  };
  LoadReport report;
  EXPECT_THAT(
      failures(1, [&](Communicator) { load_with(Differences::Policy::kError, report); }),
      Each(AllOf(HasSubstr("requested keys are not in the checkpoint"), HasSubstr("new.value"))));
  const StateDict loaded = load_with(Differences::Policy::kReport, report);
  EXPECT_THAT(report.not_in_checkpoint, ElementsAre("new.tensor", "new.value", "rng/shard_0_3"));
  EXPECT_EQ(*loaded.find(std::string("step"))->get_if<Value>(), Value(1));
  EXPECT_EQ(loaded.find(std::string("rng"))->get_if<ShardedObject>()->data, Value("own"));
  const auto& kept = *loaded.find(std::string("new"))->get_if<StateDict>();
  EXPECT_EQ(*kept.find(std::string("value"))->get_if<Value>(), Value(7));
  EXPECT_EQ(elements(*kept.find(std::string("tensor"))->get_if<TensorView>()),
            elements(counting(DType::kInt64, {2}, 40)));
}

TEST(MegatronLoad, OfTheShardedPartAloneNeitherReadsNorGivesTheCommonState) {
  FileImage image = memory_image(*saved(2));
  image.erase("common.pt");  // now only the broken object has the common state
  std::erase_if(image, [](const auto& file) { return file.first.ends_with(".manifest"); });
  for (auto& [name, bytes] : image) {
    const size_t at = name.ends_with(".distcp") ? as_text(bytes).find("step") : std::string::npos;
    if (at != std::string::npos) bytes[at] ^= std::byte{1};
  }
  const auto load_part = [&](const Communicator& comm, bool sharded_only) {
    StateDict wanted, inner;
    inner[int64_t{7}] = ShardedTensor::from_rank_offsets(
        "w", TensorView::without_data(DType::kFloat32, {1, 8}), {{0, comm.rank(), 2}});
    wanted["list"] = StateList{StateNode(std::move(inner)), StateNode(StateList{})};
    wanted["rng"] = ShardedObject::make("rng", nullptr, {2}, {comm.rank()});
    LoadOptions options;
    options.comm = comm;
    options.sharded_only = sharded_only;
    return load(wanted, Location(memory_storage(image)), options);
  };
  run_ranks(2, [&](Communicator comm) {
    const StateDict loaded = load_part(comm, true);
    EXPECT_EQ(loaded.size(), 2u);
    const auto& list = *loaded.find(std::string("list"))->get_if<StateList>();
    ASSERT_EQ(list.size(), 2u);
    EXPECT_TRUE(list[1].get_if<StateList>()->empty());
    const StateNode* rows = list[0].get_if<StateDict>()->find(int64_t{7});
    EXPECT_EQ(elements(rows->get_if<ShardedTensor>()->data),
              elements(counting(DType::kFloat32, {1, 8}, 1 + 8 * comm.rank())));
    EXPECT_EQ(loaded.find(std::string("rng"))->get_if<ShardedObject>()->data, Value(comm.rank()));
  });
  EXPECT_THAT(failures(2, [&](Communicator comm) { load_part(comm, false); }),
              Each(HasSubstr("common_state/shard_0_1")));
  EXPECT_THAT(failures(2, [&](Communicator comm) { load_part(comm, comm.rank() == 1); }),
              Each(HasSubstr("the ranks don't agree on sharded_only")));
}

TEST(MegatronLoad, OfTheShardedPartAloneTakesUnwrappedLeavesByTheirPaths) {
  const auto storage = saved(2);
  LoadOptions options;
  options.sharded_only = true;
  StateDict wanted;
  wanted["w"] = counting(DType::kFloat32, {2, 8}, 0);
  wanted["rng/shard_1_2"] = nullptr;
  const StateDict loaded = load(wanted, Location(storage), options);
  EXPECT_EQ(elements(*loaded.find(std::string("w"))->get_if<TensorView>()),
            elements(counting(DType::kFloat32, {2, 8}, 1)));
  EXPECT_EQ(*loaded.find(std::string("rng/shard_1_2"))->get_if<Value>(), Value(1));
  wanted["step"] = 0;
  expect_error([&] { load(wanted, Location(storage), options); }, ErrorCode::kNotFound,
               "the object is not in the checkpoint");
  const StateDict all = load(std::nullopt, Location(storage), options);
  EXPECT_EQ(all.size(), 3u);  // "w" and two parts of "rng"
}

TEST(MegatronLoad, AnUnwrappedLeafIsNoTensorOfAnotherShapeThatIsKept) {
  const auto storage = saved(2);
  LoadOptions options;
  options.differences.other_shape = Differences::Policy::kReport;
  StateDict wanted;
  wanted["other"] =
      ShardedTensor::from_box("w", counting(DType::kFloat32, {3}), {3}, Box::whole({3}));
  wanted["w"] = 7;
  EXPECT_THAT(failures(1, [&](Communicator) { load(wanted, Location(storage), options); }),
              Each(HasSubstr("has a tensor under this key")));
}

TEST(MegatronLoad, WithoutATemplateGivesEntitiesByKeyAndTheCommonState) {
  FileImage image = memory_image(*saved(2));
  FileImage newer = image;  // as 0.19 writes: only the object has the common state
  newer.erase("common.pt");
  std::erase_if(newer, [](const auto& file) { return file.first.ends_with(".manifest"); });
  for (const FileImage& files : {image, newer}) {
    run_ranks(2, [&](Communicator comm) {
      LoadOptions options;
      options.comm = comm;
      const StateDict loaded = load(std::nullopt, Location(memory_storage(files)), options);
      EXPECT_EQ(loaded.size(), 5u);
      EXPECT_EQ(elements(*loaded.find(std::string("w"))->get_if<TensorView>()),
                elements(counting(DType::kFloat32, {2, 8}, 1)));
      EXPECT_EQ(*loaded.find(std::string("rng/shard_1_2"))->get_if<Value>(), Value(1));
      EXPECT_EQ(*loaded.find(std::string("step"))->get_if<Value>(), Value(1));
      EXPECT_EQ(*loaded.find(std::string("p"))->get_if<Value>(),
                Value(counting(DType::kInt64, {3}, 1)));
    });
  }
}

TEST(MegatronLoad, WithoutATemplateAKeyOfTheCommonStateThatAnEntityHasIsRefused) {
  const auto storage = memory_storage();
  StateDict state;
  state["w"] = 1;
  state["entity"] =
      ShardedTensor::from_box("w", counting(DType::kInt64, {2}), {2}, Box::whole({2}));
  save(state, Location(storage), options_of(solo()));
  EXPECT_THAT(failures(1, [&](Communicator) { load(std::nullopt, Location(storage)); }),
              Each(HasSubstr("have one place in its tree")));
}

TEST(MegatronCheckpoint, OthersHaveNoCommonState) {
  const auto storage = memory_storage();
  save(row_state(solo(), 1), Location(storage));
  EXPECT_EQ(Checkpoint::open(Location(storage)).common(), std::nullopt);
}

// The problems of a checkpoint; "" if there are none.
std::string problems(const FileImage& image) {
  try {
    OpenOptions options;
    options.resources.threads = 1;
    const VerifyReport report = Checkpoint::open(Location(memory_storage(image)), options).verify();
    std::string text;
    for (const Damage& damage : report.damages) {
      text += damage.file + " " + damage.key + ": " + damage.problem + "\n";
    }
    return text;
  } catch (const Error& error) {
    return error.what();
  }
}

TEST(MegatronVerify, AFlippedByteOfAnyFileIsFound) {
  FileImage image = memory_image(*saved(1));
  ASSERT_EQ(problems(image), "");
  for (auto& [name, bytes] : image) {
    for (size_t at = 0; at < bytes.size(); at += 7) {
      bytes[at] ^= std::byte{0x10};
      EXPECT_NE(problems(image), "") << name << " byte " << at;
      bytes[at] ^= std::byte{0x10};
    }
  }
}

TEST(MegatronVerify, AMissingFileIsFoundByItsName) {
  const FileImage image = memory_image(*saved(1));
  for (const std::string name : {"common.pt", "metadata.json"}) {
    FileImage less = image;
    less.erase(name);
    EXPECT_THAT(problems(less), HasSubstr(name));
  }
}

// As stock Megatron-Core writes them: no manifest describes the files.
TEST(MegatronVerify, WithoutAManifestDamageIsFoundByParsing) {
  FileImage image = memory_image(*saved(1));
  std::erase_if(image, [](const auto& file) { return file.first.ends_with(".manifest"); });
  const std::string without = problems(image);
  Bytes& common = image["common.pt"];
  common[common.size() / 4] ^= std::byte{1};
  EXPECT_THAT(problems(image), HasSubstr("common.pt"));
  common.resize(10);
  EXPECT_THAT(problems(image), HasSubstr("common.pt"));
  image["metadata.json"].pop_back();
  EXPECT_THAT(problems(image), HasSubstr("metadata.json"));
  EXPECT_THAT(without, testing::Not(HasSubstr("common.pt")));
}

TEST(MegatronSave, ReplacesAnotherCheckpointAsAWhole) {
  const auto parent = memory_storage();
  const auto storage = parent->child("ckpt");
  save(row_state(solo(), 1), Location(storage));
  SaveOptions options = options_of(solo());
  expect_error([&] { save(row_state(solo(), 2), Location(storage), options); },
               ErrorCode::kAlreadyExists, "");
  options.overwrite = true;
  save(row_state(solo(), 2), Location(storage), options);
  const Checkpoint checkpoint = Checkpoint::open(Location(storage));
  EXPECT_EQ(checkpoint.dialect().name(), "megatron");
  EXPECT_EQ(*checkpoint.common()->find("step"), Value(2));
  EXPECT_TRUE(checkpoint.verify().ok());
  save(row_state(solo(), 3), Location(storage), options);
  EXPECT_EQ(*Checkpoint::open(Location(storage)).common()->find("step"), Value(3));
}

// The format's .metadata exists by then, and PyTorch would take it for a checkpoint.
TEST(MegatronSave, OneThatFailsBeforeTheSwitchLeavesNoFileOfTheIndex) {
  const auto storage = memory_storage();
  const auto disk = FaultDisk::create(storage, [](const StorageCall& call) {
    return call.op == StorageOp::kSync && call.name == "common.pt" ? FaultAction::fail(EIO)
                                                                   : FaultAction::pass();
  });
  expect_error([&] { save(row_state(solo(), 1), Location(disk->storage()), options_of(solo())); },
               ErrorCode::kIo, "");
  for (const auto& [name, bytes] : disk->surviving_image(Survival::kAll)) {
    EXPECT_TRUE(name.starts_with(".tilestone/")) << name;
  }
}

}  // namespace tilestone::megatron_test
