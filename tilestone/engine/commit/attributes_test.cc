// Attributes of a checkpoint and of its tensors: saved in the manifest and read back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tilestone/base/error_testing.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/format.h"
#include "tilestone/format/known/known.h"

namespace tilestone::attributes_test {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;

using ByKey = std::map<std::string, Attributes>;

SaveOptions saving(const Communicator& comm, ByKey attributes) {
  SaveOptions options;
  options.comm = comm;
  options.resources.buffer_bytes = 1u << 20;
  options.tensor_attributes = std::move(attributes);
  return options;
}

// Includes attributes from a rank that does not write the tensor, and saves by files.
TEST(TensorAttributes, OfAllRanksComeBackInEveryFormatAndDialect) {
  for (const auto& format : known_formats()) {
    for (const auto& dialect : known_dialects()) {
      for (const bool files : {false, true}) {
        if (files && (format->needs_grid() || dialect->shares_directory())) continue;
        SCOPED_TRACE(std::string(format->name()) + " " + std::string(dialect->name()));
        const Location location(memory_storage());
        run_ranks(2, [&](Communicator comm) {
          const std::string name = "of rank " + std::to_string(comm.rank());
          SaveOptions options = saving(comm, {{"w", {{"kind", "glu"}, {name, 0.5}}}});
          options.format = format;
          options.dialect = dialect;
          if (files) {
            options.comm = Communicator();
            options.by_files = ByFiles{comm.rank(), comm.size(), "a run of a test"};
          }
          StateDict state;
          state["w"] = row_state(comm, 1).at("w");
          state["both"] = ShardedTensor::from_rank_offsets("both", counting(DType::kInt8, {4}), {},
                                                           {comm.rank()});
          state["both"].get_if<ShardedTensor>()->declare_replicas({0, 1});
          if (comm.rank() == 1) options.tensor_attributes["both"] = {{"axes", Value::list({1, 2})}};
          save(state, location, options);
        });
        const ByKey expected = {{"both", {{"axes", Value::list({1, 2})}}},
                                {"w", {{"kind", "glu"}, {"of rank 0", 0.5}, {"of rank 1", 0.5}}}};
        const auto found = Checkpoint::open(location).metadata().attributes;
        EXPECT_EQ(ByKey(found.begin(), found.end()), expected);
      }
    }
  }
}

TEST(TensorAttributes, OfATensorThatTheRankDoesNotSaveAreRefusedByKey) {
  const auto storage = memory_storage();
  const Error error = error_of([&] {
    save(row_state({}, 1), Location(storage), saving({}, {{"other", {{"kind", "glu"}}}}));
  });
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(error.key(), "other");
  EXPECT_TRUE(storage->list().empty());
}

TEST(TensorAttributes, OfAKindThatNoManifestKeepsAreRefusedByKey) {
  const Error error = error_of([&] {
    save(row_state({}, 1), Location(memory_storage()),
         saving({}, {{"w", {{"mine", counting(DType::kInt8, {1})}}}}));
  });
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(error.key(), "w");
  EXPECT_THAT(error.message(), HasSubstr("\"mine\""));
}

TEST(TensorAttributes, ThatContradictOneAnotherFailTheSaveOnEveryRank) {
  const auto storage = memory_storage();
  const auto texts = failures(2, [&](Communicator comm) {
    save(row_state(comm, 1), Location(storage), saving(comm, {{"w", {{"of", comm.rank()}}}}));
  });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("\"of\""), HasSubstr("rank 0 and rank 1"))));
  EXPECT_FALSE(storage->stat(".metadata"));
}

}  // namespace tilestone::attributes_test
