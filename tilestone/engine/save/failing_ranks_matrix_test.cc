// One rank of three fails, for each way to coordinate ranks and in each step of a save. Checks
// which error the other ranks get and when, what is on the disk, and that a save works afterwards.
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <cerrno>
#include <chrono>
#include <iostream>
#include <map>
#include <optional>
#include <thread>

#include "tilestone/base/error.h"
#include "tilestone/base/sanitized_testing.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/open/attempt_files_internal.h"
#include "tilestone/engine/save/save_steps_testing.h"
#include "tilestone/engine/session.h"
#include "tilestone/state/device_memory_testing.h"
#include "tilestone/storage/fault_storage_testing.h"

namespace tilestone::failing_ranks_matrix_test {

using Clock = std::chrono::steady_clock;

constexpr int kRanks = 3;
constexpr double kSlow = kSanitized ? 3 : 1;
constexpr double kShort = 1.5 * kSlow;  // seconds: the timeout in cases where the ranks reach it
constexpr double kLong = 60;            // in the other cases
constexpr double kTakeOver = 12;        // the time that a publisher is given at most
constexpr double kMargin = 8;           // in which a rank ends after its last wait
constexpr int64_t kOld = 7, kNew = 50;

enum class Way { kExchange, kSession, kBackground, kFiles, kFilesNoWait, kRankLocal };
enum class Where {
  kState,    // the rank's state can't be saved
  kOptions,  // its options differ from the others'
  kStage,    // its tensors can't be copied
  kGivesUpPlanned,
  kGivesUpStaged,
  kGivesUpWritten,
  kWrite,    // its disk is full
  kReport,   // its report can't be written
  kPublish,  // the rank that publishes can't
  kNeverComes,
  kDies,  // the process dies while it writes
  kLate,  // still prepares its state when the others' deadline passes
};

struct Cell {
  Way way;
  Where where;
};

std::string name_of(const Cell& cell) {
  static constexpr const char* kWays[] = {
      "exchange", "session", "background", "files", "files without waiting", "rank-local"};
  static constexpr const char* kPlaces[] = {"its state",
                                            "its options",
                                            "staging",
                                            "gives up when planned",
                                            "gives up when staged",
                                            "gives up when written",
                                            "writing",
                                            "reporting",
                                            "publishing",
                                            "never comes",
                                            "dies",
                                            "comes late"};
  return std::string(kWays[static_cast<int>(cell.way)]) + ", " +
         kPlaces[static_cast<int>(cell.where)];
}

bool is_by_files(Way way) {
  return way == Way::kFiles || way == Way::kFilesNoWait || way == Way::kRankLocal;
}

// The rank that fails. With a communicator the coordinator publishes; by files the last rank to
// come does.
int failing_rank(const Cell& cell) {
  return cell.where == Where::kPublish && !is_by_files(cell.way) ? 0 : 1;
}

// True if the other ranks can't learn of the failure before their deadline.
bool takes_until_the_deadline(const Cell& cell) {
  return cell.where == Where::kNeverComes || cell.where == Where::kDies ||
         cell.where == Where::kLate;
}

// True if, by files, the waiting ranks publish the save themselves after the failed publisher's
// time is over.
bool is_taken_over(const Cell& cell) {
  return cell.where == Where::kPublish && is_by_files(cell.way) && cell.way != Way::kFilesNoWait;
}

// What the errors of the other ranks contain; "": they have no error.
std::string others_hear(const Cell& cell) {
  if (cell.way == Way::kFilesNoWait || is_taken_over(cell)) return "";
  if (cell.where == Where::kPublish) return "rank 0";
  return "rank 1";
}

// What the error of the failing rank contains.
std::string says(const Cell& cell) {
  switch (cell.where) {
    case Where::kState:
      return "hollow";
    case Where::kOptions:
      return "common_differs";
    case Where::kStage:
      return "the device is gone";
    case Where::kWrite:
      return "No space left on device";
    case Where::kReport:
    case Where::kPublish:
      return "Input/output error";
    default:
      return "";
  }
}

// A tensor of which each rank has a row, a tensor that is declared to be on all ranks, and an
// object.
StateDict state_of(int rank, int64_t first) {
  ShardedTensor all =
      ShardedTensor::from_rank_offsets("p", counting(DType::kInt64, {3}, first), {}, {rank});
  all.declare_replicas({0, 1, 2});
  StateDict state;
  state["w"] = ShardedTensor::from_rank_offsets(
      "w", counting(DType::kFloat32, {1, 8}, first + 8 * rank), {{0, rank, kRanks}});
  state["p"] = all;
  state["step"] = Value(first);
  return state;
}

// Adds a value that takes longer to make than the others wait.
void add_slow(StateDict& state) {
  ShardedTensorFactory factory;
  factory.key = "slow";
  factory.data = counting(DType::kInt64, {3});
  factory.build = [](const std::string&, const TensorView&, const ReplicaId&,
                     const std::optional<FlatRange>&) -> StateNode {
    std::this_thread::sleep_for(std::chrono::duration<double>(kShort + 1));
    return StateDict();
  };
  state["slow"] = factory;
}

class FailingSave {
 public:
  explicit FailingSave(const Cell& cell) : cell_(cell), sync_(kRanks) {
    disk_ = FaultDisk::create(inner_, [this](const StorageCall& call) { return act_on(call); });
  }

  void go() {
    for (const std::exception_ptr& error :
         run_ranks_collect(kRanks, [this](const Communicator& comm) { rank(comm); })) {
      EXPECT_EQ(error, nullptr) << name_of(cell_);
    }
    if (cell_.way == Way::kRankLocal) publish(Location(inner_));
    expect_rows(Location(inner_), kNew, kRanks);
    EXPECT_TRUE(Checkpoint::open(Location(inner_)).verify().ok());
    remove_leftovers(Location(inner_));  // of the save that has failed
    EXPECT_TRUE(find_unpublished(Location(inner_)).empty());
  }

 private:
  FaultAction act_on(const StorageCall& call) {
    if (armed_ && call.op == StorageOp::kOpen && call.name.ends_with(".outcome")) {
      ++looks_[call.client];
    }
    if (!armed_ || call.client != failing_rank(cell_)) return FaultAction::pass();
    const bool to_data =
        call.op == StorageOp::kAppend && call.name.find("distcp") != call.name.npos;
    const auto renames_to = [&](std::string_view end) {
      return call.op == StorageOp::kRename && call.to.ends_with(end);
    };
    switch (cell_.where) {
      case Where::kWrite:
        return to_data ? FaultAction::fail(ENOSPC) : FaultAction::pass();
      case Where::kDies:
        if (!to_data) return FaultAction::pass();
        // If the threads of a dead process ran on, they would send the error.
        if (!is_by_files(cell_.way))
          std::this_thread::sleep_for(std::chrono::duration<double>(2 * kShort));
        return FaultAction::die();
      case Where::kGivesUpStaged:  // in the background: before it has written
        while (to_data && cell_.way == Way::kBackground && !gave_up_) std::this_thread::yield();
        return FaultAction::pass();
      case Where::kReport:
        return renames_to("/1.report") || renames_to(".receipt-0-1") ? FaultAction::fail(EIO)
                                                                     : FaultAction::pass();
      case Where::kPublish:
        return renames_to(cell_.way == Way::kRankLocal ? "/merged" : ".metadata") &&
                       !renames_to("__1.metadata")
                   ? FaultAction::fail(EIO)
                   : FaultAction::pass();
      default:
        return FaultAction::pass();
    }
  }

  SaveOptions options_of(const Communicator& comm, double timeout) const {
    SaveOptions options;
    options.comm = comm;
    options.timeout = timeout;
    options.resources.threads = 1;
    options.resources.buffer_bytes = 1u << 20;
    options.checks.common_differs = Checks::Differing::kIgnore;
    options.overwrite = true;
    if (!is_by_files(cell_.way)) return options;
    options.overwrite = false;
    options.comm = Communicator();
    options.by_files = ByFiles{comm.rank(), kRanks, kToken, 0, cell_.way != Way::kFilesNoWait};
    options.by_files->torch_rank_local = cell_.way == Way::kRankLocal;
    return options;
  }

  bool has_session() const { return cell_.way == Way::kSession || cell_.way == Way::kBackground; }
  Session& session_of(const Communicator& comm) {
    return *sessions_[static_cast<size_t>(comm.rank())];
  }

  SteppedSave begin(const Communicator& comm, const StateDict& state, const Location& location,
                    const SaveOptions& options) {
    if (!has_session()) return begin_save(state, location, options);
    return begin_save(session_of(comm), state, location, options);
  }

  SaveResult save_all(const Communicator& comm, const StateDict& state, const Location& location,
                      const SaveOptions& options) {
    if (cell_.way == Way::kBackground) {
      return session_of(comm).async_save(state, location, options).result();
    }
    return begin(comm, state, location, options).stage().write().report().publish();
  }

  // The failing rank's save.
  void fail(const Communicator& comm) {
    const Location location(disk_->storage(comm.rank()));
    const bool waits = takes_until_the_deadline(cell_);
    SaveOptions options = options_of(comm, waits && !is_by_files(cell_.way) ? kShort : kLong);
    StateDict state = state_of(comm.rank(), kNew);
    switch (cell_.where) {
      case Where::kNeverComes:
        return;
      case Where::kState:
        state["hollow"] = TensorView::without_data(DType::kFloat32, {2});
        break;
      case Where::kLate:
        add_slow(state);
        break;
      case Where::kOptions:
        options.checks.common_differs = Checks::Differing::kWarn;
        come_behind(false);
        break;
      case Where::kPublish:
        come_behind(true);
        break;
      case Where::kStage:
        device_->fail_at = 0;
        state["w"] = ShardedTensor::from_rank_offsets(
            "w", device_->put(counting(DType::kFloat32, {1, 8}, kNew + 8)),
            {{0, comm.rank(), kRanks}});
        break;
      default:
        break;
    }
    if (cell_.way == Way::kBackground) return fail_in_background(comm, state, location, options);
    SteppedSave planned = begin(comm, state, location, options);
    if (cell_.where == Where::kGivesUpPlanned) return;
    SteppedSave staged = planned.stage();
    if (cell_.where == Where::kGivesUpStaged) return;
    SteppedSave written = staged.write();
    if (cell_.where == Where::kGivesUpWritten) return;
    written.report().publish();
  }

  void fail_in_background(const Communicator& comm, const StateDict& state,
                          const Location& location, const SaveOptions& options) {
    const AsyncSave saving = session_of(comm).async_save(state, location, options);
    if (cell_.where == Where::kGivesUpStaged) {
      saving.abandon();
      gave_up_ = true;
    }
    saving.result();
  }

  static std::string id() { return engine::save_id_of(kToken, 0); }
  // By files, a rank comes after the others have begun; or after they wait, or have ended without
  // waiting.
  void come_behind(bool waiting) const {
    const auto begin = Clock::now();
    const auto has_come = [&] {
      if (!waiting) return inner_->stat(engine::attempt_name(id())).has_value();
      return looks_[0] > kLooksBefore && looks_[2] > kLooksBefore;
    };
    while (is_by_files(cell_.way) && !has_come() &&
           Clock::now() - begin < std::chrono::seconds(20)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }

  void rank(const Communicator& comm) {
    const bool fails = comm.rank() == failing_rank(cell_);
    if (has_session()) sessions_[static_cast<size_t>(comm.rank())].emplace(comm, kLong);
    // The old checkpoint. A session keeps its plan.
    if (!is_by_files(cell_.way)) {
      save_all(comm, state_of(comm.rank(), kOld), Location(inner_), options_of(comm, kLong));
    }
    sync_.arrive_and_wait();
    if (comm.rank() == 0) armed_ = true;
    sync_.arrive_and_wait();
    const std::string text = text_of([&] { fails ? fail(comm) : save_beside(comm); });
    judge(fails, text);
    sync_.arrive_and_wait();
    if (comm.rank() == 0) expect_on_disk();
    sync_.arrive_and_wait();
    // The same ranks save again: by files under the same number, or the next if the save has
    // failed.
    SaveOptions again = options_of(comm, kLong);
    if (again.by_files && engine::read_failed(*inner_, id())) again.by_files->number = 1;
    const StateDict state = state_of(comm.rank(), kNew);
    EXPECT_EQ(text_of([&] { save_all(comm, state, Location(inner_), again); }), "")
        << name_of(cell_) << ", second save";
  }

  void save_beside(const Communicator& comm) {
    const double timeout = takes_until_the_deadline(cell_) ? kShort : kLong;
    const auto begin = Clock::now();
    const auto check_time = [&] {
      // A rank that learns of the failure at once ends long before the deadline.
      const double waits = takes_until_the_deadline(cell_) ? kShort : 0;
      const double limit = waits + (is_taken_over(cell_) ? kTakeOver : 0) + kMargin * kSlow;
      const double took = std::chrono::duration<double>(Clock::now() - begin).count();
      EXPECT_LT(took, limit) << name_of(cell_);
    };
    try {
      save_all(comm, state_of(comm.rank(), kNew), Location(disk_->storage(comm.rank())),
               options_of(comm, timeout));
    } catch (...) {
      check_time();
      throw;
    }
    check_time();
    looks_[comm.rank()] = kLooksBefore + 1;
  }

  static std::string text_of(const std::function<void()>& body) {
    try {
      body();
    } catch (const std::exception& error) {  // the device's own, on its rank
      return error.what();
    }
    return "";
  }

  void judge(bool fails, const std::string& text) {
    const std::string part = fails ? says(cell_) : others_hear(cell_);
    EXPECT_NE(text.find(part), std::string::npos)
        << name_of(cell_) << (fails ? ", the rank: " : ", another rank: ") << text;
    // A rank that does not wait hears of the failure if it comes later.
    if (fails || !part.empty() || text.empty()) return;
    const auto left = engine::read_failed(*inner_, id());
    EXPECT_TRUE(left && text.find(left->message()) == 0) << name_of(cell_) << ": " << text;
  }

  // Expects the old checkpoint, or none. By files, the files that the others have written wait for
  // the failed rank.
  void expect_on_disk() {
    armed_ = false;
    SCOPED_TRACE(name_of(cell_));
    if (!is_by_files(cell_.way)) return expect_rows(Location(inner_), kOld, kRanks);
    if (cell_.where == Where::kLate) return;  // the late rank has completed the save
    if (is_taken_over(cell_)) return;
    const std::string text = text_of([&] { Checkpoint::open(Location(inner_)); });
    EXPECT_NE(text.find("no "), std::string::npos) << name_of(cell_) << ": " << text;
    EXPECT_EQ(find_unpublished(Location(inner_)).size(), 1u) << name_of(cell_);
  }

  const Cell cell_;
  const std::shared_ptr<Storage> inner_ = memory_storage();
  std::shared_ptr<FaultDisk> disk_;
  std::atomic<bool> armed_ = false;
  // A rank looks for the outcome at most so often before it waits.
  static constexpr int kLooksBefore = 8;
  std::atomic<int> looks_[kRanks] = {};
  std::atomic<bool> gave_up_ = false;
  const std::shared_ptr<LateDevice> device_ = LateDevice::create();
  std::barrier<> sync_;
  std::optional<Session> sessions_[kRanks];
};

bool happens(Way way, Where where) {
  // In the background a rank takes all steps at once; it may give up while they run.
  const bool is_step = where == Where::kGivesUpPlanned || where == Where::kGivesUpWritten;
  if (way == Way::kBackground) return !is_step;
  // In steps a rank that can't stage gives up. With a communicator a report is a message, no file.
  return where != Where::kStage && (where != Where::kReport || is_by_files(way));
}

std::vector<Cell> all_cells() {
  std::vector<Cell> cells;
  for (const Way way : {Way::kExchange, Way::kSession, Way::kBackground, Way::kFiles,
                        Way::kFilesNoWait, Way::kRankLocal}) {
    for (const Where where :
         {Where::kState, Where::kOptions, Where::kStage, Where::kGivesUpPlanned,
          Where::kGivesUpStaged, Where::kGivesUpWritten, Where::kWrite, Where::kReport,
          Where::kPublish, Where::kNeverComes, Where::kDies, Where::kLate}) {
      if (happens(way, where)) cells.push_back({way, where});
    }
  }
  return cells;
}

// All cases run at the same time, because most of them wait.
TEST(FailingRankMatrix, EachRankGetsAnErrorInTimeTheCheckpointIsWholeAndTheNextSaveWorks) {
  set_log_level(LogLevel::kOff);
  const std::vector<Cell> cells = all_cells();
  std::vector<std::thread> threads;
  std::map<Way, int> counts;
  for (const Cell& cell : cells) {
    ++counts[cell.way];
    threads.emplace_back([cell] {
      SCOPED_TRACE(name_of(cell));
      FailingSave(cell).go();
    });
  }
  for (std::thread& thread : threads) thread.join();
  set_log_level(LogLevel::kWarning);
  std::cout << cells.size() << " cells:";
  for (const auto& [way, count] : counts) std::cout << " " << count;
  std::cout
      << " by way (exchange, session, background, files, files without waiting, rank-local)\n";
}

}  // namespace tilestone::failing_ranks_matrix_test
