// Ranks that lose the coordinator when a save or load has ended on it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "tilestone/comm/relay_testing.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/load/load_internal.h"
#include "tilestone/engine/open/description_internal.h"
#include "tilestone/format/known/known.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::lost_answer_test {

using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr int kRanks = 3;

// The coordinator is gone once `has_ended` says so. The others learn it in the place of an answer.
class LosesTheCoordinator final : public RelayComm {
 public:
  LosesTheCoordinator(Communicator comm, std::function<bool()> has_ended)
      : RelayComm(std::move(comm)), has_ended_(std::move(has_ended)) {}
  Bytes scatter(std::vector<Bytes> parts, Deadline deadline) override {
    Bytes part = comm_.scatter(std::move(parts), deadline);
    if (rank() != 0 && has_ended_()) throw Error(ErrorCode::kRankFailed, "the store is gone");
    return part;
  }

 private:
  std::function<bool()> has_ended_;
};

struct Kind {
  const char* format;
  const char* dialect;
};

class LostAnswer : public testing::TestWithParam<Kind> {
 protected:
  std::shared_ptr<Storage> storage() const { return posix_storage(folder_.path() + "/ckpt"); }

  SaveOptions options(const Communicator& comm) const {
    SaveOptions options;
    options.comm = comm;
    options.format = format_named(GetParam().format);
    options.dialect = save_dialect_named(GetParam().dialect);
    options.overwrite = true;
    options.resources.threads = 1;
    options.timeout = 60;
    return options;
  }

  // Each rank's save id.
  std::vector<std::string> save_all(int64_t first) const {
    std::vector<std::string> ids(kRanks);
    run_ranks(kRanks, [&](const Communicator& comm) {
      const SaveResult saved = save(row_state(comm, first), Location(storage()), options(comm));
      ids[static_cast<size_t>(comm.rank())] = saved.save_id;
    });
    return ids;
  }

  const TempDirectory folder_;
};

TEST_P(LostAnswer, ARankThatLosesItFindsThePublishedCheckpointAndReturns) {
  for (const int64_t first : {3, 50}) {  // to a fresh location, then over that checkpoint
    const LoggedWarnings logged;
    const auto texts = failures(kRanks, [&](const Communicator& plain) {
      const Location location(storage());
      const auto stands = [&] {
        try {
          return step_of(Checkpoint::open(Location(storage()))) == Value(first);
        } catch (const Error&) {
          return false;
        }
      };
      const Communicator comm(std::make_shared<LosesTheCoordinator>(plain, stands));
      const SaveResult saved = save(row_state(plain, first), location, options(comm));
      EXPECT_FALSE(saved.save_id.empty());
    });
    EXPECT_THAT(texts, Each(""));
    expect_rows(Location(storage()), first, kRanks);
    EXPECT_THAT(logged.texts(), Each(HasSubstr("is published, but the coordinator")));
    EXPECT_EQ(logged.texts().size(), 2u);
  }
}

TEST_P(LostAnswer, OnlyTheCheckpointOfTheSaveItselfCounts) {
  const auto format = format_named(GetParam().format);
  const std::string id = save_all(3).front();
  EXPECT_TRUE(engine::holds_checkpoint_of(*storage(), format, id));
  const std::string next = save_all(50).front();
  EXPECT_FALSE(engine::holds_checkpoint_of(*storage(), format, id));
  EXPECT_TRUE(engine::holds_checkpoint_of(*storage(), format, next));
  EXPECT_FALSE(engine::holds_checkpoint_of(*memory_storage(), format, next));
}

TEST_P(LostAnswer, ACoordinatorThatIsLostBeforeItPublishesIsAnError) {
  const std::string id = save_all(3).front();
  int scatters = 0;
  const auto texts = failures(2, [&](const Communicator& plain) {
    // The second answer is that to the reports.
    const auto ended = [&] { return ++scatters == 2; };
    const Communicator comm(std::make_shared<LosesTheCoordinator>(plain, ended));
    save(row_state(plain, 50), Location(storage()), options(comm));
  });
  EXPECT_THAT(texts, Each(HasSubstr("gave no answer after writing")));
  EXPECT_TRUE(engine::holds_checkpoint_of(*storage(), format_named(GetParam().format), id));
}

INSTANTIATE_TEST_SUITE_P(Kinds, LostAnswer,
                         testing::Values(Kind{"torch_dist", "pytorch"},
                                         Kind{"torch_dist", "megatron"}, Kind{"zarr", "megatron"}),
                         [](const auto& kind) {
                           return std::string(kind.param.format) + "_" + kind.param.dialect;
                         });

// In the round in which each rank takes over what it has loaded.
TEST(LostAnswerOfALoad, ARankThatHasItsOwnGoesOnAndOneThatFailedItselfDoesNot) {
  const auto storage = memory_storage();
  run_ranks(kRanks, [&](const Communicator& comm) {
    SaveOptions options;
    options.comm = comm;
    save(row_state(comm, 3), Location(storage), options);
  });
  const LoggedWarnings quiet;
  const auto texts = failures(kRanks, [&](const Communicator& plain) {
    bool taken = false;
    const Communicator comm(std::make_shared<LosesTheCoordinator>(plain, [&] { return taken; }));
    const StateDict wanted = row_template(plain);
    const Location location(storage);
    const LoadOptions asked;
    engine::LoadByRounds load(comm, "a place", Deadline::after(std::chrono::seconds(60)));
    const auto loaded = load.read(engine::LoadView{&wanted, &location, &asked}, false);
    taken = true;
    EXPECT_EQ(loaded.state.get<Value>("step"), Value(int64_t{3}));
    std::optional<Error> failed;
    if (plain.rank() == 2) failed.emplace(ErrorCode::kInvalidArgument, "rank 2 can't take it");
    load.finish(failed);
  });
  EXPECT_THAT(texts, ElementsAre(HasSubstr("can't take it"), "", HasSubstr("gave no answer")));
}

}  // namespace tilestone::lost_answer_test
