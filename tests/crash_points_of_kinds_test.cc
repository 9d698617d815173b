// Simulates a crash of the machine at every storage call of a save, for each format and dialect.
// The location is empty, or holds a checkpoint of each format and dialect. All, none or any part of
// the unsynced data survives. Afterwards the location must hold a checkpoint of one save, the old
// or the new one. This must hold for stock readers too: every file that they know by a fixed name
// must be of that save. A later save must succeed and leave nothing beside the location.
#include <gtest/gtest.h>

#include <map>
#include <regex>

#include "tilestone/base/error.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/format.h"
#include "tilestone/format/known/known.h"
#include "tilestone/storage/crashes_testing.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"

namespace tilestone::crash_points_of_kinds_test {

constexpr int64_t kOld = 100;  // the first element of the existing checkpoint
constexpr int64_t kNew = 500;
constexpr int64_t kLater = 900;
constexpr int64_t kUnsynced = 300;  // of a save that died before its last sync
constexpr int kRanks = 2;
constexpr int kEarlier = 100;  // first client number of the earlier save
// The machine dies at every n-th point. CMake sets it; it is greater than 1 under sanitizers.
constexpr uint64_t kStride = TILESTONE_CRASH_STRIDE;
const std::string kPlace = "ckpt";

// A format and a dialect. None: the location is empty.
struct Kind {
  std::shared_ptr<const Format> format;
  std::shared_ptr<const Dialect> dialect;

  std::string name() const {
    if (format == nullptr) return "nothing";
    return std::string(format->name()) + " " + std::string(dialect->name());
  }
};

std::vector<Kind> all_kinds() {
  const std::vector<std::shared_ptr<const Dialect>> dialects = known_dialects();
  std::vector<Kind> kinds;
  for (const auto& format : known_formats()) {
    for (const auto& dialect : dialects) kinds.push_back({format, dialect});
  }
  return kinds;
}

void save_rows(const Communicator& comm, const std::shared_ptr<Storage>& storage, const Kind& kind,
               int64_t first) {
  SaveOptions options;
  options.comm = comm;
  options.format = kind.format;
  options.dialect = kind.dialect;
  options.overwrite = true;
  options.resources.buffer_bytes = 1u << 20;
  options.resources.threads = 1;
  options.timeout = 60;
  save(row_state(comm, first), storage->child(kPlace), options);
}

FileImage saved_image(const Kind& kind, int64_t first) {
  const auto storage = memory_storage();
  if (kind.format != nullptr) {
    run_ranks(kRanks, [&](Communicator comm) { save_rows(comm, storage, kind, first); });
  }
  return memory_image(*storage);
}

bool names_its_save(const std::string& name) {
  static const std::regex id("[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}");
  return std::regex_search(name, id);
}

// The files that a stock reader finds at the location by fixed names, which are the same in all
// saves.
FileImage stock_files(const FileImage& image) {
  FileImage found;
  for (const auto& [name, bytes] : image) {
    const bool hidden = name.starts_with(kPlace + "/.tilestone/");
    if (name.starts_with(kPlace + "/") && !hidden && !names_its_save(name)) {
      found.emplace(name, bytes);
    }
  }
  return found;
}

// The files of a save as a stock reader sees them. A content that differs from save to save is
// not compared.
class Expected {
 public:
  Expected(const Kind& kind, int64_t first) {
    const FileImage other = stock_files(saved_image(kind, first));
    for (const auto& [name, bytes] : stock_files(saved_image(kind, first))) {
      files_[name] = bytes == other.at(name) ? std::optional(bytes) : std::nullopt;
    }
  }

  void compare(const FileImage& image) const {
    const FileImage found = stock_files(image);
    EXPECT_EQ(found.size(), files_.size());
    for (const auto& [name, bytes] : found) {
      const auto expected = files_.find(name);
      if (expected == files_.end()) {
        ADD_FAILURE() << name << " is of another save";
      } else if (expected->second) {
        EXPECT_EQ(bytes, *expected->second) << name;
      }
    }
  }

 private:
  std::map<std::string, std::optional<Bytes>> files_;
};

struct Scenario {
  Kind before, after;
  FileImage image;
  Expected old_files, new_files;
  // If set, an earlier save of the same kind died after it had exchanged the directories and before
  // it had synced them, so a power loss may revert the exchange.
  std::optional<Expected> unsynced_files;

  Scenario(const Kind& before_in, const Kind& after_in)
      : before(before_in),
        after(after_in),
        image(saved_image(before, kOld)),
        old_files(before, kOld),
        new_files(after, kNew) {}

  const Expected& files_of(int64_t found) const {
    if (found == kUnsynced && unsynced_files) return *unsynced_files;
    return found == kNew ? new_files : old_files;
  }
};

FaultAction die_after_the_exchange(const StorageCall& call) {
  const bool last = call.op == StorageOp::kExchangeDirectories;
  return last ? FaultAction::die_after() : FaultAction::pass();
}

std::shared_ptr<FaultDisk> save_on(const Scenario& scenario, const FaultHook& hook) {
  const auto by_client = [&](const StorageCall& call) {
    if (call.client >= kEarlier) return die_after_the_exchange(call);
    return hook(call);
  };
  const auto disk = FaultDisk::create(memory_storage(scenario.image), by_client);
  if (scenario.unsynced_files) {
    run_ranks_collect(kRanks, [&](Communicator comm) {
      save_rows(comm, disk->storage(kEarlier + comm.rank()), scenario.after, kUnsynced);
    });
  }
  run_ranks_collect(kRanks, [&](Communicator comm) {
    save_rows(comm, disk->storage(comm.rank()), scenario.after, kNew);
  });
  return disk;
}

// The first element of the checkpoint at the location; 0 if there is none. A checkpoint that is
// not whole fails the test.
int64_t find_checkpoint(const std::shared_ptr<Storage>& storage) {
  try {
    OpenOptions options;
    options.resources.threads = 1;
    options.resources.buffer_bytes = 1u << 20;
    const Checkpoint checkpoint = Checkpoint::open(storage->child(kPlace), options);
    const int64_t first = step_of(checkpoint).as_int();
    const VerifyReport report = checkpoint.verify();
    EXPECT_TRUE(report.ok()) << report.damages.front().problem;
    EXPECT_EQ(elements(checkpoint.read("w")),
              elements(counting(DType::kFloat32, {kRanks, 8}, first)));
    EXPECT_EQ(plain_of(checkpoint), elements(counting(DType::kInt64, {3}, first)));
    return first;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotFound) << error.what();
    return 0;
  }
}

void expect_nothing_beside(Storage& storage) {
  for (const std::string& name : storage.list()) {
    EXPECT_TRUE(name.starts_with(kPlace + "/")) << name;
  }
}

void judge(const Scenario& scenario, const FileImage& image, uint64_t number) {
  const auto storage = memory_storage(image);
  const int64_t found = find_checkpoint(storage);
  const bool unsynced = scenario.unsynced_files && found == kUnsynced;
  EXPECT_TRUE(found == kNew || unsynced || found == (scenario.image.empty() ? 0 : kOld))
      << "found " << found;
  scenario.files_of(found).compare(image);
  if (number % 3 != 0 || testing::Test::HasFailure()) return;
  if (number % 2 == 0 && !storage->list().empty()) {
    remove_leftovers(storage->child(kPlace), true);
    expect_nothing_beside(*storage);
    EXPECT_EQ(find_checkpoint(storage), found);
  }
  const bool again = number % 2 == 0 || scenario.before.format == nullptr;
  save_rows(Communicator(), storage, again ? scenario.after : scenario.before, kLater);
  expect_nothing_beside(*storage);
  EXPECT_EQ(step_of(Checkpoint::open(storage->child(kPlace))), Value(kLater));
}

uint64_t crash_everywhere(const Scenario& scenario) {
  const std::string name = scenario.after.name() + " over " + scenario.before.name();
  SCOPED_TRACE(name);
  const uint64_t points = tilestone::crash_everywhere(
      [&](const FaultHook& hook) { return save_on(scenario, hook); },
      [&](const FileImage& image, uint64_t number) { judge(scenario, image, number); }, kStride);
  std::printf("[          ] %s: %lu crash points\n", name.c_str(),
              static_cast<unsigned long>(points));
  return points;
}

class CrashPointsOfKinds : public testing::TestWithParam<int> {
 protected:
  // The log would report every simulated crash.
  CrashPointsOfKinds() : level_(set_log_level(LogLevel::kOff)) {}
  ~CrashPointsOfKinds() override { set_log_level(level_); }

 private:
  LogLevel level_;
};

TEST_P(CrashPointsOfKinds, OverNothingAndOverEachKindOneSaveIsTheCheckpoint) {
  const std::vector<Kind> kinds = all_kinds();
  const Kind& after = kinds[static_cast<size_t>(GetParam())];
  uint64_t points = crash_everywhere(Scenario({}, after));
  for (const Kind& before : kinds) {
    if (HasFailure()) break;
    points += crash_everywhere(Scenario(before, after));
  }
  EXPECT_GT(points, 50u / kStride * (kinds.size() + 1));
}

TEST(CrashPointsOfExchanges, AfterASaveWhoseExchangeWasNotSynced) {
  const LogLevel level = set_log_level(LogLevel::kOff);
  const Kind kind{format_named("torch_dist"), dialect_named("megatron")};
  Scenario scenario(kind, kind);
  scenario.unsynced_files.emplace(kind, kUnsynced);
  EXPECT_GT(crash_everywhere(scenario), 50u / kStride);
  set_log_level(level);
}

INSTANTIATE_TEST_SUITE_P(All, CrashPointsOfKinds,
                         testing::Range(0, static_cast<int>(all_kinds().size())),
                         [](const testing::TestParamInfo<int>& param) {
                           std::string name = all_kinds()[static_cast<size_t>(param.param)].name();
                           name[name.find(' ')] = '_';
                           return name;
                         });

}  // namespace tilestone::crash_points_of_kinds_test
