// Saves that share files with earlier ones, removals and killed processes in random orders: every
// step that is left holds what its save was given.
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <optional>
#include <random>
#include <string>

#include "tilestone/base/error.h"
#include "tilestone/base/sanitized_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/save/save.h"
#include "tilestone/engine/training_run/checkpoint_manager.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"

namespace tilestone::reuse_orders_test {

constexpr int kSteps = 5;       // numbers of steps
constexpr int kOperations = 8;  // of an order

// What a step was given: a version of each of two large tensors, and a number of its own.
struct Content {
  int first = 0;
  int second = 0;
  int64_t own = 0;
};

class Order {
 public:
  Order(uint64_t seed, bool objects)
      : random_(seed), inner_(objects ? memory_objects() : memory_storage()) {
    disk_ = FaultDisk::create(inner_, [this](const StorageCall& call) {
      return call.client == victim_ && left_-- == 0 ? FaultAction::die() : FaultAction::pass();
    });
  }

  void run() {
    for (int i = 0; i < kOperations; ++i) {
      const int step = below(kSteps);
      // A third of the processes are killed somewhere.
      victim_ = ++client_;
      left_ = below(3) == 0 ? below(70) : -1;
      try {
        if (below(4) == 0) {
          remove(step);
        } else {
          save(step);
        }
      } catch (const Error& error) {
        // Killed, or there is a checkpoint already.
        if (error.code() != ErrorCode::kIo && error.code() != ErrorCode::kAlreadyExists) throw;
      }
      victim_ = 0;
    }
    for (const auto& [step, contents] : contents_) expect(step, contents);
  }

  uint64_t shared() const { return shared_; }

 private:
  int below(int n) { return static_cast<int>(random_() % static_cast<uint64_t>(n)); }

  // The run, as a process of its own sees it.
  RunDirectory process() { return RunDirectory(Location(disk_->storage(client_))); }

  void save(int step) {
    const Content content{below(5) == 0, below(5) == 0, ++saves_};
    RunDirectory run = process();
    SaveOptions options;
    options.overwrite = below(2) == 0;
    options.resources.threads = 1;
    options.resources.buffer_bytes = 1u << 20;
    const auto earlier = contents_.lower_bound(below(kSteps));
    if (earlier != contents_.end()) {
      options.reuse = run.at(run.name_of(static_cast<uint64_t>(earlier->first)));
    }
    StateDict state;
    state["first"] = large(content.first);
    state["second"] = large(content.second);
    state["own"] = content.own;
    may_hold(step).push_back(content);
    const SaveResult result =
        tilestone::save(state, run.at(run.name_of(static_cast<uint64_t>(step))), options);
    shared_ += result.bytes_shared;
    contents_[step] = {content};
  }

  void remove(int step) {
    may_hold(step).push_back(std::nullopt);
    RunDirectory run = process();
    if (run.remove(run.name_of(static_cast<uint64_t>(step))) == Removed::kNow) {
      contents_[step] = {std::nullopt};
    }
  }

  using Contents = std::vector<std::optional<Content>>;  // nullopt: there is no checkpoint
  Contents& may_hold(int step) {
    return contents_.try_emplace(step, Contents{std::nullopt}).first->second;
  }

  static const TensorView& large(int version) {
    static const TensorView tensors[] = {counting(DType::kFloat32, {270'000}, 1),
                                         counting(DType::kFloat32, {270'000}, 2)};
    return tensors[version];
  }

  void expect(int step, const Contents& contents) {
    const RunDirectory run((Location(inner_)));
    const Location location = run.at(run.name_of(static_cast<uint64_t>(step)));
    std::optional<Checkpoint> checkpoint;
    try {
      checkpoint = Checkpoint::open(location);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kNotFound) << error.what();
    }
    for (const auto& content : contents) {
      if (content.has_value() != checkpoint.has_value()) continue;
      if (!content) return;
      if (checkpoint->read_object("own").as_int() != content->own) continue;
      EXPECT_TRUE(checkpoint->verify().ok());
      EXPECT_EQ(elements(checkpoint->read("first")), elements(large(content->first)));
      EXPECT_EQ(elements(checkpoint->read("second")), elements(large(content->second)));
      return;
    }
    ADD_FAILURE() << "step " << step << (checkpoint ? " has another content" : " is gone");
  }

  std::mt19937_64 random_;
  const std::shared_ptr<Storage> inner_;
  std::shared_ptr<FaultDisk> disk_;
  int client_ = 0;
  int victim_ = 0;  // the client that is killed
  int left_ = -1;   // once it has made so many calls more
  int64_t saves_ = 0;
  uint64_t shared_ = 0;               // bytes
  std::map<int, Contents> contents_;  // by step: what it may hold
};

TEST(ReuseOrders, EachStepThatIsLeftHoldsWhatItWasGiven) {
  const char* const given = std::getenv("TILESTONE_REUSE_ORDERS");  // `make soak` wants more
  const uint64_t orders = given != nullptr ? std::strtoull(given, nullptr, 10) : kReduced ? 20 : 60;
  uint64_t shared = 0;
  for (uint64_t seed = 0; seed < orders; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Order order(seed, seed % 4 == 3);
    order.run();
    shared += order.shared();
    if (testing::Test::HasFailure()) return;
  }
  EXPECT_GT(shared, orders * 100'000);
}

}  // namespace tilestone::reuse_orders_test
