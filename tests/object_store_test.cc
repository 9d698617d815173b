// What is done at a directory is done in an object store, too: one in memory, and SeaweedFS.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>

#include "tilestone/base/sanitized_testing.h"
#include "tilestone/base/thread_pool.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/convert/convert.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/save/async_save.h"
#include "tilestone/engine/training_run/checkpoint_manager.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/storage/s3/client.h"
#include "tilestone/storage/s3/local_server_testing.h"
#include "tilestone/storage/s3/real_server_testing.h"
#include "tilestone/storage/s3/store.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::object_store_test {

using testing::ElementsAre;
using testing::Le;

// Of a bucket of the server, whose address and keys the environment says, as for a user.
Location seaweed_location() {
  static int count = 0;
  if (count == 0) {
    for (const auto& [name, value] : s3::seaweed().config().environment) {
      ::setenv(name.c_str(), value.c_str(), 1);
    }
    s3::seaweed().create_bucket("engine");
  }
  return "s3://engine/place-" + std::to_string(count++);
}

struct Place {
  const char* name;
  std::function<Location()> make;
};

class ObjectStore : public testing::TestWithParam<Place> {
 protected:
  const Location location_ = GetParam().make();
};

SaveOptions saving(const Communicator& comm, bool overwrite = false) {
  SaveOptions options;
  options.comm = comm;
  options.overwrite = overwrite;
  options.timeout = 60;
  return options;
}

void save_rows(const Location& location, int ranks, int64_t first, bool overwrite = false) {
  run_ranks(ranks, [&](Communicator comm) {
    save(row_state(comm, first), location, saving(comm, overwrite));
  });
}

TEST_P(ObjectStore, SavesOfOneAndOfFourRanksAreOpenedLoadedAndVerified) {
  save_rows(location_, 1, 3);
  expect_rows(location_, 3, 1);
  save_rows(location_, 4, 5, true);
  expect_rows(location_, 5, 4);
  EXPECT_TRUE(Checkpoint::open(location_).verify().ok());
  run_ranks(2, [&](Communicator comm) {
    StateDict wanted;
    wanted["w"] = ShardedTensor::from_rank_offsets(
        "w", TensorView::without_data(DType::kFloat32, {2, 8}), {{0, comm.rank(), comm.size()}});
    LoadOptions options;
    options.comm = comm;
    const StateDict loaded = load(wanted, location_, options);
    EXPECT_EQ(elements(loaded.at("w").as<ShardedTensor>().data),
              elements(counting(DType::kFloat32, {2, 8}, 5 + 16 * comm.rank())));
  });
}

TEST_P(ObjectStore, ASaveOverACheckpointNeedsOverwriteAndLeavesNothingOfIt) {
  save_rows(location_, 2, 3);
  expect_error([&] { save(row_state(0, 1), location_); }, ErrorCode::kAlreadyExists);
  expect_rows(location_, 3, 2);
  const auto names = location_.storage().list();
  save_rows(location_, 2, 7, true);
  expect_rows(location_, 7, 2);
  EXPECT_EQ(location_.storage().list().size(), names.size());
}

TEST_P(ObjectStore, WhatIsUnchangedIsCopiedByTheStore) {
  StateDict state;
  state["w"] = counting(DType::kFloat32, {400'000});
  const auto at = [&](int step) { return location_.within(std::to_string(step)); };
  for (int step = 0; step < 4; ++step) {
    SaveOptions options = saving({});
    if (step > 0) options.reuse = at(step - 1);
    state["step"] = step;
    const SaveResult result = save(state, at(step), options);
    EXPECT_EQ(result.bytes_shared > 1'600'000, step > 1) << step;
    EXPECT_EQ(result.bytes_written < 10'000, step > 1) << step;
  }
  for (int step = 0; step < 3; ++step) at(step).storage().remove(at(step).storage().list());
  const Checkpoint checkpoint = Checkpoint::open(at(3));
  EXPECT_TRUE(checkpoint.verify().ok());
  EXPECT_EQ(elements(checkpoint.read("w")), elements(counting(DType::kFloat32, {400'000})));
}

TEST_P(ObjectStore, SavesInTheBackground) {
  run_ranks(2, [&](Communicator comm) {
    async_save(row_state(comm, 3), location_, saving(comm)).result(60);
  });
  expect_rows(location_, 3, 2);
}

TEST_P(ObjectStore, IsConvertedToADirectoryAndBack) {
  save_rows(location_, 2, 3);
  const TempDirectory directory;
  const Location local(directory.path() + "/local");
  ConvertOptions options;
  options.format = "torch_dist";
  convert(location_, local, options);
  expect_rows(local, 3, 2);
  const Location back = GetParam().make();
  convert(local, back, options);
  expect_rows(back, 3, 2);
  options.format = "safetensors";
  options.keys = {"w"};
  const auto in_fixed_names = [&] { convert(location_, GetParam().make(), options); };
  expect_error(in_fixed_names, ErrorCode::kUnsupported, "fixed names");
}

TEST_P(ObjectStore, ARunKeepsItsLastSteps) {
  run_ranks(2, [&](Communicator comm) {
    ManagerOptions options;
    options.comm = comm;
    options.keep = Keep{.last = 2};
    CheckpointManager manager(location_, options);
    for (uint64_t step = 1; step <= 4; ++step) {
      manager.save(step, row_state(comm, static_cast<int64_t>(step)));
      manager.wait();
    }
    EXPECT_EQ(manager.latest(), 4u);
    // SeaweedFS still lists the folders of removed steps.
    const auto steps = manager.steps();
    const auto durable = std::ranges::count(steps, StepState::kDurable, &StepInfo::state);
    if (comm.rank() == 0) {
      EXPECT_EQ(durable, 2);
    }
    CheckpointManager second(location_, options);
    const auto restored = second.restore(row_template(comm));
    EXPECT_EQ(restored.step, 4u);
    EXPECT_EQ(restored.state.at("step").as<Value>(), Value(4));
  });
}

TEST_P(ObjectStore, GcFindsWhatAFailedSaveHasLeft) {
  save_rows(location_, 1, 3);
  EXPECT_THAT(find_leftovers(location_), ElementsAre());
}

// At a bucket, through a proxy that may damage what passes.
class Proxied {
 public:
  explicit Proxied(s3::FaultProxy::Choose choose)
      : place_(seaweed_location().identity()), proxy_(s3::seaweed().url(), std::move(choose)) {}

  Location location() {
    return Location(s3::s3_store(s3::parse_url(place_), s3::seaweed().config_for(proxy_.url())));
  }
  std::vector<s3::Upload> uploads() const {
    const s3::Url url = s3::parse_url(place_);
    s3::Client client(s3::seaweed().config(), url.bucket);
    return client.uploads(url.prefix + "/", std::nullopt, Deadline::after(std::chrono::seconds(20)))
        .wait()
        .uploads;
  }
  Location unharmed() const { return Location(place_); }
  int faults() const { return proxy_.faults(); }

 private:
  const std::string place_;
  s3::FaultProxy proxy_;
};

// Counts the requests to a place.
class Counted {
 public:
  Location location() { return place_.location(); }
  int taken() { return count_.exchange(0); }

 private:
  std::atomic<int> count_ = 0;
  Proxied place_{[this](const s3::ServedRequest&) {
    ++count_;
    return s3::Fault::kNone;
  }};
};

// How many requests are sent by a save to an empty place, by one over it, and by opening the
// checkpoint and reading one small tensor. Each save also finds out the conditions of the bucket,
// by 4 requests, because nothing is known of a client that was made anew.
std::vector<int> requests_of(const SaveOptions& options) {
  Counted place;
  std::vector<int> taken;
  SaveOptions again = options;
  again.overwrite = true;
  save(row_state(0, 1), place.location(), options);
  taken.push_back(place.taken());
  save(row_state(0, 1), place.location(), again);
  taken.push_back(place.taken());
  Checkpoint::open(place.location()).read("w");
  taken.push_back(place.taken());
  return taken;
}

TEST(Requests, OfSavesAndOfOpeningACheckpoint) {
  EXPECT_THAT(requests_of({}), ElementsAre(Le(15), Le(19), Le(4)));
}

TEST(Requests, OfOpeningACheckpointOfMegatron) {
  Counted place;
  SaveOptions options;
  options.dialect = megatron_dialect();
  save(row_state(0, 1), place.location(), options);
  place.taken();
  Checkpoint::open(place.location()).read("w");
  EXPECT_THAT(place.taken(), Le(6));
}

TEST(Requests, WhoPublishesLooksForTheRanksFilesByAListing) {
  std::atomic<int> looks = 0;
  Proxied place([&](const s3::ServedRequest& request) {
    if (request.method == "HEAD" && request.has(".distcp")) ++looks;
    return s3::Fault::kNone;
  });
  save_rows(place.location(), 4, 3);
  EXPECT_EQ(looks, 0);
}

// The third step is the first that removes one. SeaweedFS goes on listing its folder, at which
// later steps look.
TEST(Requests, OfAManagersSteps) {
  Counted place;
  CheckpointManager manager(place.location(), {.keep = Keep{.last = 2}});
  std::vector<int> taken;
  for (uint64_t step = 1; step <= 3; ++step) {
    place.taken();
    manager.save(step, row_state(0, 1), {{"loss", 0.5}});
    manager.wait();
    taken.push_back(place.taken());
  }
  EXPECT_THAT(taken, ElementsAre(Le(23), Le(19), Le(29)));
}

// A page of a list has a thousand names, and the folders are a thousand and one.
TEST(Requests, OfARunWithAThousandSteps) {
  Counted place;
  const Location run = place.location();
  {
    CheckpointManager manager(run);
    manager.save(1, row_state(0, 1), {{"loss", 0.5}});
    manager.wait();
  }
  const std::string first = run.storage().list(".tilestone/steps/").front();
  const auto put = [&](const std::string& name) {
    run.storage().put(name, {}, Condition::always(), name + ".tmp", Deadline::never());
  };
  ThreadPool pool(16);
  pool.parallel_for(999, [&](size_t i) {
    const std::string step = fmt::format("{:08}", i + 2);
    put("step-" + step + "/.metadata");
    std::string hint = first;
    hint.replace(hint.find("00000001,1,"), 11, fmt::format("{},{},", step, i + 2));
    put(hint);
  });
  place.taken();
  const RunDirectory listed(run);
  EXPECT_EQ(listed.latest(), 1000u);
  EXPECT_THAT(place.taken(), Le(3));
  EXPECT_EQ(listed.best({"loss", Best::Mode::kMin, 1}), 1000u);
  EXPECT_THAT(place.taken(), Le(3));
  EXPECT_EQ(steps_of_run(listed)->size(), 1000u);  // as `tilestone ls RUN`
  EXPECT_THAT(place.taken(), Le(3));
}

// One in four requests, but no request twice in a row.
class RandomFaults {
 public:
  explicit RandomFaults(uint32_t seed) : chance_(seed) {}

  s3::Fault operator()(const s3::ServedRequest& request) {
    using s3::Fault;
    const std::lock_guard lock(mutex_);
    bool& last = last_[request.method + request.target];
    last = !last && chance_() % 4 == 0;
    if (!last) return Fault::kNone;
    constexpr Fault kFaults[] = {Fault::kUnavailable, Fault::kTooMany,         Fault::kConflict,
                                 Fault::kLostAnswer,  Fault::kErrorAfterwards, Fault::kCutRequest,
                                 Fault::kCutAnswer};
    return kFaults[chance_() % std::size(kFaults)];
  }

 private:
  std::mutex mutex_;
  std::mt19937 chance_;
  std::map<std::string, bool> last_;
};

TEST(Conditions, WithoutAnyACheckpointIsNotReplacedAndNothingIsSavedByFiles) {
  Proxied place([](const s3::ServedRequest& request) {
    const bool asks = request.headers.contains("if-match") && request.method == "PUT";
    return asks || request.headers.contains("if-none-match") ? s3::Fault::kNotImplemented
                                                             : s3::Fault::kNone;
  });
  SaveOptions options;
  options.by_files = ByFiles{.rank = 0, .world_size = 1, .token = "a job of tests"};
  expect_error([&] { save(row_state(0, 1), place.location(), options); }, ErrorCode::kUnsupported,
               "no conditional writes");
  EXPECT_TRUE(place.unharmed().storage().list().empty());
  save_rows(place.location(), 1, 3);
  const auto names = place.unharmed().storage().list();
  options = {.overwrite = true};
  expect_error([&] { save(row_state(0, 1), place.location(), options); }, ErrorCode::kUnsupported,
               "can't be replaced");
  EXPECT_EQ(place.unharmed().storage().list(), names);
  expect_rows(place.unharmed(), 3, 1);
}

// Of one seed. With one in ten the store answers nothing for longer than the save has time.
class FaultsOfSeed {
 public:
  explicit FaultsOfSeed(uint32_t seed)
      : random_(seed), before_(5 + static_cast<int>(std::mt19937(seed)() % 40)) {
    if (seed % 10 != 5) return;
    timeout = 0.5;
    silence_ = std::chrono::milliseconds(700);
  }

  s3::Fault operator()(const s3::ServedRequest& request) {
    if (silence_.count() == 0 || ++requests_ <= before_) return random_(request);
    const std::lock_guard lock(mutex_);
    if (!end_) end_ = Deadline::after(silence_);
    return end_->expired() ? random_(request) : s3::Fault::kUnavailable;
  }

  double timeout = 60;  // of the save, in seconds

 private:
  RandomFaults random_;
  std::chrono::milliseconds silence_{0};
  const int before_;  // requests
  std::atomic<int> requests_ = 0;
  std::mutex mutex_;
  std::optional<Deadline> end_;
};

// One place behind one proxy, for all seeds.
class FaultyPlace {
 public:
  void begin(std::shared_ptr<FaultsOfSeed> faults) {
    const std::lock_guard lock(mutex_);
    faults_ = std::move(faults);
  }
  Proxied& operator*() { return place_; }

 private:
  std::mutex mutex_;
  std::shared_ptr<FaultsOfSeed> faults_;
  Proxied place_{[this](const s3::ServedRequest& request) {
    std::unique_lock lock(mutex_);
    const auto faults = faults_;
    lock.unlock();
    return faults == nullptr ? s3::Fault::kNone : (*faults)(request);
  }};
};

// With one in four seeds a rank uploads in parts.
StateDict state_of_seed(const Communicator& comm, uint32_t seed, int64_t first) {
  StateDict state = row_state(comm, first);
  const bool is_large = seed % 4 == 0 && seed / 4 % 2 == static_cast<uint32_t>(comm.rank());
  state["more" + std::to_string(comm.rank())] =
      counting(DType::kFloat32, {is_large ? 9 << 18 : 256}, first);
  return state;
}

void save_of_seed(const Location& location, uint32_t seed, int64_t first) {
  run_ranks(2, [&](Communicator comm) {
    save(state_of_seed(comm, seed, first), location, saving(comm, true));
  });
}

// A save through faults over `before`, then one without.
void run_seed(FaultyPlace& faulty, uint32_t seed, int64_t before) {
  Proxied& place = *faulty;
  const auto faults = std::make_shared<FaultsOfSeed>(seed);
  faulty.begin(faults);
  const auto errors = failures(2, [&](Communicator comm) {
    SaveOptions options = saving(comm, true);
    options.timeout = faults->timeout;
    save(state_of_seed(comm, seed, before + 1), place.location(), options);
  });
  EXPECT_EQ(errors[0].empty(), errors[1].empty()) << errors[0] << errors[1];
  const Value stands = step_of(Checkpoint::open(place.unharmed()));
  const bool is_old = stands == Value(before) && !errors[0].empty();
  EXPECT_TRUE(is_old || stands == Value(before + 1)) << errors[0];
  EXPECT_TRUE(Checkpoint::open(place.unharmed()).verify().ok());
  save_of_seed(place.unharmed(), seed, before + 2);
  EXPECT_EQ(step_of(Checkpoint::open(place.unharmed())), Value(before + 2));
  EXPECT_TRUE(place.uploads().empty());
}

// `make soak` asks for more seeds.
TEST(Faults, OfASaveLeaveThePreviousCheckpointOrTheNewOneAndNoUpload) {
  const char* const asked = ::getenv("TILESTONE_FAULT_SEEDS");
  const uint32_t seeds = asked != nullptr ? static_cast<uint32_t>(std::stoul(asked))
                         : kReduced       ? 6
                                          : 100;
  FaultyPlace place;
  int64_t before = 3;
  save_of_seed((*place).unharmed(), 0, before);
  for (uint32_t seed = 1; seed <= seeds; ++seed, before += 2) {
    SCOPED_TRACE(seed);
    run_seed(place, seed, before);
  }
  EXPECT_GT((*place).faults(), static_cast<int>(seeds));
}

Place in_memory() {
  static int count = 0;  // each has a description of its own, as places have
  return {"memory",
          [] { return Location(memory_objects()->child("p" + std::to_string(count++))); }};
}

INSTANTIATE_TEST_SUITE_P(All, ObjectStore,
                         testing::Values(in_memory(), Place{"seaweed", seaweed_location}),
                         [](const auto& each) { return std::string(each.param.name); });

}  // namespace tilestone::object_store_test
