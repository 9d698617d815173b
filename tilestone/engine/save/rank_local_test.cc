// Torch's rank-local mode: each rank publishes its own metadata, and publish() makes an ordinary
// checkpoint of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/open/attempt_files_internal.h"
#include "tilestone/format/zarr/zarr.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"

namespace tilestone::rank_local_test {

constexpr int kRanks = 3;

SaveOptions rank_local(int rank, const std::string& token = kToken) {
  SaveOptions options;
  options.by_files = ByFiles{rank, kRanks, token};
  options.by_files->wait = false;
  options.by_files->torch_rank_local = true;
  options.timeout = 20;
  options.resources.threads = 1;
  return options;
}

// Row `rank` of "w"; "p", which every rank has; "e", of which only the first rank has elements; and
// two objects, one of which differs per rank.
StateDict state_of(int rank, int64_t first, int64_t first_of_p = 0) {
  StateDict state;
  state["w"] = ShardedTensor::from_rank_offsets(
      "w", counting(DType::kFloat32, {1, 8}, first + 8 * rank), {{0, rank, kRanks}});
  state["p"] = counting(DType::kInt64, {3}, first + first_of_p);
  state["step"] = Value(first);
  state["of rank " + std::to_string(rank)] = Value(int64_t{rank});
  return state;
}

// The state of an ordinary save by one rank.
StateDict other_state() {
  StateDict state;
  state["step"] = Value(int64_t{5});
  return state;
}

void save_rank(const std::shared_ptr<Storage>& storage, int rank, int64_t first = 3) {
  save(state_of(rank, first), Location(storage), rank_local(rank));
}

std::shared_ptr<Storage> saved(int64_t first = 3) {
  auto storage = memory_storage();
  for (int rank = 0; rank < kRanks; ++rank) save_rank(storage, rank, first);
  return storage;
}

// A checkpoint as another writer leaves it, or as a copy without hidden files.
std::shared_ptr<Storage> saved_without_hidden_files() {
  return memory_storage(without_tilestones_files(memory_image(*saved())));
}

bool has(const std::shared_ptr<Storage>& storage, const std::string& name) {
  return storage->stat(name).has_value();
}

void expect_state(const std::shared_ptr<Storage>& storage, int64_t first = 3) {
  const Checkpoint checkpoint = Checkpoint::open(Location(storage));
  EXPECT_EQ(elements(checkpoint.read("w")), elements(counting(DType::kFloat32, {3, 8}, first)));
  EXPECT_EQ(elements(checkpoint.read("p")), elements(counting(DType::kInt64, {3}, first)));
  EXPECT_EQ(checkpoint.read_object("step"), Value(first));
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(checkpoint.read_object("of rank " + std::to_string(rank)), Value(rank));
  }
  EXPECT_TRUE(checkpoint.verify().ok());
}

void expect_ordinary(const std::shared_ptr<Storage>& storage, int64_t first = 3) {
  expect_state(storage, first);
  const Checkpoint checkpoint = Checkpoint::open(Location(storage));
  const Metadata& metadata = checkpoint.metadata();
  EXPECT_FALSE(metadata.rank_local);
  EXPECT_EQ(metadata.find_tensor("p")->chunks.size(), 1u);
  EXPECT_EQ(metadata.copies.size(), static_cast<size_t>(kRanks - 1));  // of "p"
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_FALSE(has(storage, "__" + std::to_string(rank) + ".metadata"));
  }
  EXPECT_FALSE(has(storage, ".tilestone/replaced"));
  EXPECT_TRUE(find_unpublished(Location(storage)).empty());
  EXPECT_TRUE(find_leftovers(Location(storage)).empty());
}

template <typename Body>
std::string text_of(ErrorCode code, const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

void expect_part(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

// Runs `meanwhile` before the first storage call with this operation and name.
template <typename Meanwhile>
std::shared_ptr<Storage> interrupted(const std::shared_ptr<Storage>& inner, StorageOp op,
                                     const std::string& end_of_name, const Meanwhile& meanwhile) {
  const auto done = std::make_shared<bool>(false);
  return FaultDisk::create(inner,
                           [=](const StorageCall& call) {
                             if (call.op == op && call.name.ends_with(end_of_name) &&
                                 !std::exchange(*done, true)) {
                               meanwhile();
                             }
                             return FaultAction::pass();
                           })
      ->storage();
}

TEST(RankLocalSave, ARankWhoseReceiptGoesIntoItsGroupsWhileItReadsItGoesOn) {
  const auto inner = memory_storage();
  bool merged = false;
  const auto storage = interrupted(inner, StorageOp::kOpen, "/0/0.report", [&] {
    save_rank(inner, 1);
    merged = true;
  });
  EXPECT_NO_THROW(save_rank(storage, 0));
  EXPECT_TRUE(merged);
  save_rank(inner, 2);
  expect_state(inner);
}

TEST(RankLocalSave, RanksWhoseReceiptsGoIntoTheirGroupsDuringALookAreNotMissing) {
  const auto inner = memory_storage();
  save_rank(inner, 0);
  bool merged = false;
  const auto storage = interrupted(inner, StorageOp::kStat, "/0/0.report", [&] {
    save_rank(inner, 1);
    merged = true;
  });
  const std::vector<UnpublishedSave> found = find_unpublished(Location(storage));
  EXPECT_TRUE(merged);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].missing, std::vector<int>{2});
}

TEST(RankLocalSave, ARankThatStallsBeforeItBeginsFindsItsSaveBegunAndGoesOn) {
  const auto inner = memory_storage();
  // After it has found that nobody has begun the save, and before it looks for a checkpoint.
  const auto storage = interrupted(inner, StorageOp::kList, "", [&] { save_rank(inner, 0); });
  EXPECT_NO_THROW(save_rank(storage, 1));
  save_rank(inner, 2);
  expect_state(inner);
}

// Another run begins at the same time, and gives up.
TEST(RankLocalSave, ARankDoesNotTakeAwayWhatTheFirstRankHasBegun) {
  const auto inner = memory_storage();
  engine::AttemptHead other;
  other.save_id = engine::save_id_of("another run", 0);
  other.format = "torch_dist";
  other.dialect = "pytorch";
  other.rank_local = true;
  const std::string head_of_other = engine::attempt_name(other.save_id);
  const auto storage = interrupted(inner, StorageOp::kRename, ".tmp", [&] {
    save_rank(inner, 0);
    const auto file = inner->create(head_of_other);
    file->append(ByteView(other.encode()));
    file->close();
  });
  EXPECT_NO_THROW(save_rank(storage, 1));
  EXPECT_TRUE(has(inner, engine::attempt_name(engine::save_id_of(kToken, 0))));
  inner->remove(head_of_other);
  save_rank(inner, 2);
  expect_state(inner);
}

TEST(RankLocalSave, TheRanksOfAnAbandonedSaveAreNotMissingInTheOneThatCameAfterIt) {
  const auto storage = memory_storage();
  SaveOptions larger = rank_local(0, "an earlier run");
  larger.by_files->world_size = kRanks + 1;
  save(state_of(0, 3), Location(storage), larger);
  AbandonOptions at_once;
  at_once.period = 0;
  abandon(Location(storage), at_once);
  for (int rank = 0; rank < kRanks; ++rank) save_rank(storage, rank);
  expect_state(storage);
}

TEST(RankLocalSave, RanksHaveMetadataOnceAllHaveWrittenAndReadersNameThoseThatHaveNot) {
  const auto storage = memory_storage();
  const Location location(storage);
  const auto open = [&] { Checkpoint::open(location); };
  EXPECT_FALSE(save(state_of(1, 3), location, rank_local(1)).published);
  expect_part(text_of(ErrorCode::kNotFound, open), "2 of its 3 ranks have not written");
  EXPECT_FALSE(save(state_of(0, 3), location, rank_local(0)).published);
  EXPECT_FALSE(has(storage, "__0.metadata") || has(storage, "__1.metadata"));
  LoadOptions own;
  own.own_rank = 1;
  expect_part(text_of(ErrorCode::kNotFound, [&] { load(state_of(1, 0), location, own); }),
              "1 of its 3 ranks has not written (rank 2)");
  EXPECT_TRUE(find_leftovers(location).empty());
  EXPECT_EQ(find_unpublished(location).front().missing, std::vector<int>{2});
  expect_part(text_of(ErrorCode::kRankFailed, [&] { publish(location); }), "rank 2");
  SaveOptions last = rank_local(2);
  last.by_files->wait = true;
  EXPECT_TRUE(save(state_of(2, 3), location, last).published);
  expect_state(storage);
  EXPECT_TRUE(Checkpoint::open(location).metadata().rank_local);
  EXPECT_FALSE(has(storage, ".metadata"));
  // Repeating the save does nothing, and nothing of it is a leftover.
  EXPECT_EQ(save(state_of(1, 3), location, rank_local(1)).bytes_written, 0u);
  EXPECT_TRUE(find_leftovers(location).empty());
  // Its success is a verdict: no failure and nobody who abandons it takes it away.
  AbandonOptions at_once;
  at_once.period = 0;
  text_of(ErrorCode::kUnsupported, [&] { abandon(location, at_once); });
  expect_state(storage);
}

// The last rank dies at any call. Then readers name a rank, or find the checkpoint.
TEST(RankLocalSave, WhereThePublisherDiesPublishingCompletesIt) {
  for (int at = 1, died = 1; died != 0; ++at) {
    const auto storage = memory_storage();
    for (const int rank : {0, 1}) save_rank(storage, rank);
    int calls = 0;
    const auto disk = FaultDisk::create(storage, [&](const StorageCall&) {
      return ++calls == at ? FaultAction::die() : FaultAction::pass();
    });
    try {
      save_rank(disk->storage(), 2);
      died = calls >= at ? 1 : 0;
    } catch (const Error&) {
    }
    save_rank(storage, 2);
    publish(Location(storage));
    expect_ordinary(storage);
    if (HasFailure()) return;
  }
}

TEST(RankLocalSave, PublishingMakesItOrdinaryWithReplicasNamedOnce) {
  const auto storage = saved();
  const std::string id = Checkpoint::open(Location(storage)).metadata().save_id;
  EXPECT_NE(publish(Location(storage)), id);
  expect_ordinary(storage);
}

TEST(RankLocalSave, WhatHasNoHiddenFilesIsReadOnceAndPublishedUnderANewId) {
  const auto storage = saved_without_hidden_files();
  expect_state(storage);
  const std::string old = Checkpoint::open(Location(storage)).metadata().save_id;
  EXPECT_NE(publish(Location(storage)), old);
  expect_ordinary(storage);
  EXPECT_NE(Checkpoint::open(Location(storage)).metadata().copies.front().at.checksums,
            std::nullopt);
  expect_part(text_of(ErrorCode::kNotFound, [&] { publish(Location(storage)); }),
              "no unpublished save");
}

TEST(RankLocalSave, ADataFileOfARankWithoutMetadataIsNeverLeftOut) {
  const auto storage = saved_without_hidden_files();
  storage->remove("__2.metadata");
  const auto open = [&] { Checkpoint::open(Location(storage)); };
  expect_part(text_of(ErrorCode::kCorrupt, open), "a data file of rank 2 and no metadata");
  expect_part(text_of(ErrorCode::kCorrupt, [&] { publish(Location(storage)); }), "rank 2");
}

TEST(RankLocalSave, ADamagedDataFileIsFoundWhenItIsPublishedAndTheDirectoryStaysAsItWas) {
  const auto intact = saved_without_hidden_files();
  FileImage image = memory_image(*intact);
  const Checkpoint checkpoint = Checkpoint::open(Location(intact));
  const StoredTensor& tensor = *checkpoint.metadata().find_tensor("w");
  const StoredChunk& chunk = tensor.chunks[1];
  Bytes& file = image.at(checkpoint.metadata().files[chunk.at.file]);
  const auto at = static_cast<size_t>(chunk.at.offset);
  // The first element of row 1, which has the elements 11.0, 12.0, ...
  const float wanted = 11;
  const ByteView first = as_bytes(std::string_view(reinterpret_cast<const char*>(&wanted), 4));
  const auto found = std::search(file.begin() + static_cast<std::ptrdiff_t>(at), file.end(),
                                 first.begin(), first.end());
  ASSERT_NE(found, file.end());
  *found ^= std::byte{1};
  const auto storage = memory_storage(image);
  expect_part(text_of(ErrorCode::kCorrupt, [&] { publish(Location(storage)); }), "key w");
  EXPECT_TRUE(Checkpoint::open(Location(storage)).metadata().rank_local);
  EXPECT_EQ(memory_image(*storage), image);
}

TEST(RankLocalSave, ReplicasThatDifferCantBePublishedAndAreNamed) {
  for (const bool hidden : {true, false}) {
    auto storage = memory_storage();
    for (int rank = 0; rank < kRanks; ++rank) {
      save(state_of(rank, 3, rank == 1 ? 9 : 0), Location(storage), rank_local(rank));
    }
    if (!hidden) {
      storage = memory_storage(without_tilestones_files(memory_image(*storage)));
    }
    const FileImage before = memory_image(*storage);
    expect_part(text_of(ErrorCode::kMismatch, [&] { publish(Location(storage)); }), "key p");
    EXPECT_TRUE(Checkpoint::open(Location(storage)).metadata().rank_local);
    if (!hidden) {
      EXPECT_EQ(memory_image(*storage), before);
    }
  }
}

TEST(RankLocalSave, DamagedMetadataOfARankIsRemovedAndPublishedFromItsReceipt) {
  FileImage image = memory_image(*saved());
  image.at("__1.metadata").resize(10);
  const auto storage = memory_storage(image);
  const std::string text = text_of(ErrorCode::kAlreadyExists, [&] { publish(Location(storage)); });
  expect_part(text, "__1.metadata");
  expect_part(text, "if it is only damaged, remove it and publish again");
  storage->remove("__1.metadata");
  publish(Location(storage));
  expect_ordinary(storage);
}

TEST(RankLocalSave, ADirectoryNeverHoldsBothKinds) {
  const auto refused = [](const std::shared_ptr<Storage>& storage, const SaveOptions& options) {
    const auto before = memory_image(*storage);
    text_of(ErrorCode::kAlreadyExists, [&] { save(state_of(0, 9), Location(storage), options); });
    EXPECT_EQ(memory_image(*storage), before);
  };
  const auto ordinary = memory_storage();
  save(other_state(), Location(ordinary));
  refused(ordinary, rank_local(0));
  SaveOptions by_files = rank_local(0, "another run of it");
  by_files.by_files->torch_rank_local = false;
  refused(saved(), by_files);
  refused(saved(), rank_local(0, "another run of it"));
  // Beside a save that is not published yet, before it has any metadata.
  const auto begun = memory_storage();
  save(state_of(0, 3), Location(begun), by_files);
  refused(begun, rank_local(0));
  // An index that appears after a rank has joined and before it publishes its own metadata.
  const auto late = memory_storage();
  save_rank(late, 0);
  late->publish(".metadata", "x", read_file(*ordinary, ".metadata", UINT64_MAX), false,
                Deadline::never());
  text_of(ErrorCode::kAlreadyExists, [&] { save_rank(late, 1); });
  EXPECT_FALSE(has(late, "__1.metadata"));
}

TEST(RankLocalSave, RanksOfTwoSavesAndOtherModesAreDistinguished) {
  const auto storage = memory_storage();
  save_rank(storage, 0);
  SaveOptions plain = rank_local(1);
  plain.by_files->torch_rank_local = false;
  expect_part(
      text_of(ErrorCode::kMismatch, [&] { save(state_of(1, 3), Location(storage), plain); }),
      "torch_rank_local");
  SaveOptions zarr = rank_local(0);
  zarr.format = zarr_format();
  text_of(ErrorCode::kUnsupported, [&] { save(state_of(0, 3), Location(memory_storage()), zarr); });
  // Metadata of ranks of two different saves in one directory.
  FileImage image = memory_image(*saved_without_hidden_files());
  const auto other = memory_storage();
  for (int rank = 0; rank < kRanks; ++rank) {
    save(state_of(rank, 3), Location(other), rank_local(rank, "another run of it"));
  }
  for (auto& [name, bytes] : memory_image(*other)) {
    if (!name.starts_with(".tilestone") && name.find("__1") != std::string::npos) {
      image[name] = bytes;
    }
  }
  expect_part(
      text_of(ErrorCode::kCorrupt, [&] { Checkpoint::open(Location(memory_storage(image))); }),
      "different saves");
}

TEST(RankLocalSave, AnAbandonedOneTakesItsMetadataBackAndGcTheRest) {
  const auto storage = memory_storage();
  save_rank(storage, 0);
  save_rank(storage, 2);
  AbandonOptions at_once;
  at_once.period = 0;
  const std::string id = abandon(Location(storage), at_once);
  EXPECT_FALSE(has(storage, "__0.metadata"));
  EXPECT_FALSE(remove_leftovers(Location(storage)).empty());
  for (const std::string& name : storage->list()) {
    EXPECT_TRUE(name == ".tilestone/" + id + ".outcome" || name == ".tilestone/lock") << name;
  }
  text_of(ErrorCode::kRankFailed, [&] { save_rank(storage, 1); });
  save(other_state(), Location(storage));
}

// ---- Checksums from the ranks' receipts

// The data file of a rank: its save has only one.
std::string data_file_of(const FileImage& image, int rank) {
  for (const auto& [name, bytes] : image) {
    if (name.ends_with("__" + std::to_string(rank) + "_0.distcp")) return name;
  }
  ADD_FAILURE() << "no data file of rank " << rank;
  return "";
}

TEST(RankLocalDamage, DataFilesThatWereSwappedBetweenRanksAreNeverLoaded) {
  FileImage image = memory_image(*saved());
  Bytes& second = image.at(data_file_of(image, 1));
  Bytes& third = image.at(data_file_of(image, 2));
  ASSERT_EQ(second.size(), third.size());  // so only their contents tell them apart
  std::swap(second, third);
  const auto storage = memory_storage(image);
  StateDict wanted;
  wanted["w"] = state_of(1, 0).get<ShardedTensor>("w");
  expect_part(text_of(ErrorCode::kCorrupt, [&] { load(wanted, Location(storage)); }), "key w");
  LoadOptions own;
  own.own_rank = 1;
  expect_part(text_of(ErrorCode::kCorrupt, [&] { load(wanted, Location(storage), own); }), "key w");
  const VerifyReport report = Checkpoint::open(Location(storage)).verify();
  std::set<std::string> files;
  for (const Damage& damage : report.damages) files.insert(damage.file);
  EXPECT_EQ(files, (std::set{data_file_of(image, 1), data_file_of(image, 2)}));
  publish(Location(storage));
  text_of(ErrorCode::kCorrupt, [&] { load(wanted, Location(storage)); });
}

TEST(RankLocalDamage, VerifyChecksTheObjectsOfAllRanks) {
  const auto intact = memory_storage();
  for (int rank = 0; rank < kRanks; ++rank) {
    StateDict state = state_of(rank, 3);
    state["step"] = Value("of rank " + std::to_string(rank) + ", damaged");
    save(state, Location(intact), rank_local(rank));
  }
  FileImage image = memory_image(*intact);
  Bytes& file = image.at(data_file_of(image, 2));
  const ByteView text = as_bytes(std::string_view("of rank 2, damaged"));
  const auto found = std::search(file.begin(), file.end(), text.begin(), text.end());
  ASSERT_NE(found, file.end());
  *found ^= std::byte{1};
  const auto storage = memory_storage(image);
  const VerifyReport report = Checkpoint::open(Location(storage)).verify();
  ASSERT_EQ(report.damages.size(), 1u);
  EXPECT_EQ(report.damages[0].file, data_file_of(image, 2));
  EXPECT_EQ(report.damages[0].key, "step");
}

TEST(RankLocalDamage, EveryChangedByteOfARanksMetadataIsFound) {
  const FileImage intact = memory_image(*saved());
  LoadOptions own;
  own.own_rank = 1;
  for (size_t i = 0; i < intact.at("__1.metadata").size(); ++i) {
    FileImage image = intact;
    image.at("__1.metadata")[i] ^= std::byte{4};
    const Location location(memory_storage(image));
    EXPECT_THROW(Checkpoint::open(location), Error) << "byte " << i;
    EXPECT_THROW(load(StateDict(), location, own), Error) << "byte " << i;
  }
}

TEST(RankLocalDamage, VerifySaysIfAReceiptIsMissing) {
  const auto storage = saved();
  const std::string id = Checkpoint::open(Location(storage)).metadata().save_id;
  for (const std::string& name : storage->list(".tilestone/" + id + "/")) storage->remove(name);
  EXPECT_EQ(Checkpoint::open(Location(storage)).read_object("step"), Value(int64_t{3}));
  const VerifyReport report = Checkpoint::open(Location(storage)).verify();
  ASSERT_EQ(report.damages.size(), 1u);
  EXPECT_EQ(report.damages[0].file, ".tilestone/" + id + ".attempt");
}

TEST(RankLocalDamage, WhereADataFileIsGoneNothingIsPublishedAndVerifyNamesIt) {
  const auto storage = saved();
  const std::string lost = data_file_of(memory_image(*storage), 2);
  storage->remove(lost);
  PublishOptions soon;
  soon.timeout = 0.2;
  expect_part(text_of(ErrorCode::kMismatch, [&] { publish(Location(storage), soon); }), lost);
  EXPECT_FALSE(has(storage, ".metadata"));
  EXPECT_TRUE(has(storage, "__2.metadata"));
  const VerifyReport report = Checkpoint::open(Location(storage)).verify();
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.damages.front().file, lost);
}

TEST(RankLocalDamage, ADamagedReceiptIsAnErrorThatNamesItsFile) {
  FileImage image = memory_image(*saved());
  std::string merged;
  for (auto& [name, bytes] : image) {
    if (!name.ends_with("/merged")) continue;
    merged = name;
    bytes[bytes.size() / 2] ^= std::byte{1};
    break;
  }
  ASSERT_NE(merged, "");
  const auto storage = memory_storage(image);
  const auto open = [&] { Checkpoint::open(Location(storage)); };
  const std::string text = text_of(ErrorCode::kCorrupt, open);
  expect_part(text, merged);
  EXPECT_TRUE(find_leftovers(Location(storage)).empty());
  // What the hint says makes it readable.
  const std::string own = merged.substr(0, merged.find('/', merged.find('/') + 1));
  expect_part(text, "remove " + own + ".attempt and the directory " + own);
  storage->remove_tree(own);
  storage->remove(own + ".attempt");
  expect_state(storage);
}

TEST(RankLocalDamage, ALoadOfOneRankNeedsOnlyItsOwnReceipt) {
  const auto storage = memory_storage();
  for (int rank = 0; rank < kRanks; ++rank) save_rank(storage, rank);
  FileImage image = memory_image(*storage);
  // The last group has only the last rank.
  for (auto& [name, bytes] : image) {
    if (name.find("/0/") != std::string::npos) bytes[bytes.size() / 2] ^= std::byte{1};
  }
  const auto damaged = memory_storage(image);
  text_of(ErrorCode::kCorrupt, [&] { Checkpoint::open(Location(damaged)); });
  LoadOptions own;
  own.own_rank = 2;
  const StateDict loaded = load(state_of(2, 0), Location(damaged), own);
  EXPECT_EQ(loaded.get<Value>("step"), Value(int64_t{3}));
}

// ---- Loads of one rank

// The names of the metadata files that a load reads.
template <typename Body>
std::set<std::string> metadata_read(const std::shared_ptr<Storage>& storage, const Body& body) {
  std::set<std::string> names;
  const auto disk = FaultDisk::create(storage, [&](const StorageCall& call) {
    if (call.op == StorageOp::kOpen && call.name.ends_with(".metadata")) names.emplace(call.name);
    return FaultAction::pass();
  });
  body(Location(disk->storage(0)));
  return names;
}

TEST(RankLocalLoad, ARankReadsItsOwnMetadataIfAllThatItWantsIsThereElseEverybodys) {
  const auto storage = saved();
  LoadOptions own;
  own.own_rank = 1;
  const auto wanted = [](int rank) {
    StateDict state = state_of(rank, 0);
    return state;
  };
  EXPECT_EQ(metadata_read(storage,
                          [&](const Location& location) {
                            const StateDict loaded = load(wanted(1), location, own);
                            EXPECT_EQ(loaded.get<Value>("step"), Value(int64_t{3}));
                          }),
            std::set<std::string>{"__1.metadata"});
  const std::set<std::string> all = {"__0.metadata", "__1.metadata", "__2.metadata"};
  // First another rank's row, then another rank's object.
  EXPECT_EQ(
      metadata_read(storage, [&](const Location& location) { load(wanted(2), location, own); }),
      all);
  StateDict whole;
  whole["w"] = counting(DType::kFloat32, {3, 8});
  EXPECT_EQ(metadata_read(storage,
                          [&](const Location& location) {
                            StateDict loaded = load(whole, location, own);
                            EXPECT_EQ(elements(loaded.get<TensorView>("w")),
                                      elements(counting(DType::kFloat32, {3, 8}, 3)));
                          }),
            all);
  StateDict nowhere;
  nowhere["nowhere"] = counting(DType::kFloat32, {3});
  text_of(ErrorCode::kNotFound, [&] { load(nowhere, Location(storage), own); });
  // The global metadata takes precedence.
  publish(Location(storage));
  EXPECT_EQ(
      metadata_read(storage, [&](const Location& location) { load(wanted(1), location, own); }),
      std::set<std::string>{".metadata"});
}

TEST(RankLocalLoad, ARankGetsItsOwnOfAnObjectThatDiffersFromRankToRank) {
  const auto storage = memory_storage();
  for (int rank = 0; rank < kRanks; ++rank) {
    StateDict state = state_of(rank, 3);
    state["step"] = Value(int64_t{100 + rank});
    save(state, Location(storage), rank_local(rank));
  }
  LoadOptions own;
  own.own_rank = 2;
  StateDict wanted;
  wanted["step"] = Value(int64_t{0});
  EXPECT_EQ(load(wanted, Location(storage), own).get<Value>("step"), Value(int64_t{102}));
  EXPECT_EQ(load(wanted, Location(storage)).get<Value>("step"), Value(int64_t{100}));
}

}  // namespace tilestone::rank_local_test
