// lost_host_rank FOLDER TIMEOUT PLENTY CASE...: a rank of an MPI job on two hosts, of which the
// second is lost in each case. It does over MPI what python/tests/lost_host_rank.py, which explains
// the cases and the times, does over gloo. python/tests/test_lost_host.py runs both.
//
// All calls use one communicator: each call after a failed one must work on it.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tilestone/comm/relay_testing.h"
#include "tilestone/engine/save/save_steps_testing.h"
#include "tilestone/tilestone.h"

namespace {

using namespace tilestone;
using nlohmann::json;

constexpr int64_t kSide = 512;  // rows, and columns, of the tensor
constexpr int64_t kElements = kSide * kSide;
constexpr int kRanksOfHost = 2;
constexpr int64_t kOverSlowLink = 100;  // the version that is saved over a slow link

// Lets rank 0 wait where it has received what all ranks have sent, and each rank before a transfer
// of an exchange.
class Held final : public RelayComm {
 public:
  Held(Communicator comm, std::function<void()> gathered, std::function<void()> transfers)
      : RelayComm(std::move(comm)),
        gathered_(std::move(gathered)),
        transfers_(std::move(transfers)) {}
  std::vector<Bytes> gather(ByteView mine, Deadline deadline) override {
    std::vector<Bytes> parts = comm_.gather(mine, deadline);
    if (rank() == 0) gathered_();
    return parts;
  }
  std::vector<Bytes> all_to_all(std::vector<Bytes> to, Deadline deadline) override {
    transfers_();
    return comm_.all_to_all(std::move(to), deadline);
  }

 private:
  std::function<void()> gathered_, transfers_;
};

// A rank's rows (axis 0) or columns (axis 1).
class Part {
 public:
  Part(int axis, const Communicator& comm) : axis_(axis), rank_(comm.rank()), ranks_(comm.size()) {
    Dims shape = {kSide, kSide};
    shape[axis] /= ranks_;
    data_ = TensorView::allocate(DType::kInt64, shape);
  }

  // Calls visit(element, index): the element here, and its index in the whole tensor.
  template <typename Visit>
  void for_each(Visit visit) const {
    auto* at = reinterpret_cast<int64_t*>(data_.data);
    const int64_t rows = data_.shape[0], columns = data_.shape[1];
    const int64_t first = axis_ == 0 ? rank_ * rows * kSide : rank_ * columns;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        visit(*at++, first + row * kSide + column);
      }
    }
  }
  // `built` is called when a save or load builds the tensor, `merged` when a load has loaded it.
  StateDict state(std::function<void()> built, std::function<void()> merged) const {
    ShardedTensorFactory factory;
    factory.key = "w";
    factory.data = data_;
    factory.build = [*this, built = std::move(built)](const std::string& key,
                                                      const TensorView& data, const auto&,
                                                      const auto&) -> StateNode {
      built();
      return ShardedTensor::from_rank_offsets(key, data, {{axis_, rank_, ranks_}});
    };
    factory.merge = [merged = std::move(merged)](StateNode loaded) {
      merged();
      return loaded;
    };
    StateDict state;
    state["w"] = std::move(factory);
    return state;
  }

 private:
  int axis_, rank_, ranks_;
  TensorView data_;
};

class Member {
 public:
  Member(const Communicator& comm, std::filesystem::path folder, double timeout, double plenty)
      : comm_(std::make_shared<Held>(
            comm, [this] { hold(gathers_); }, [this] { enter_transfer(); })),
        folder_(std::move(folder)),
        location_(folder_ / "checkpoint"),
        timeout_(timeout),
        plenty_(plenty) {}

  // A host is lost in this call, or rank 0 can no longer reach it.
  void lose_host(const std::string& name, int64_t version) {
    case_ = name;
    transfers_ = 0;
    std::set<int64_t> found;
    std::string kind, text;
    const auto started = std::chrono::steady_clock::now();
    try {
      if (name.starts_with("save")) {
        save(version, timeout_);
      } else {
        found = load(timeout_);
      }
    } catch (const Error& error) {
      kind = to_string(error.code());
      text = error.what();
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - started;
    say("ended", {{"kind", kind}, {"text", text}, {"seconds", took.count()}, {"versions", found}});
  }

  // Says what the checkpoint is now, saves the next one, and says what remains of it all.
  void go_on(int64_t version) {
    say("whole", {{"versions", load(plenty_)}});
    save(version, plenty_);
    std::vector<std::string> left;
    if (comm_.rank() == 0) {
      for (const Leftover& file : remove_leftovers(location_)) left.push_back(file.name);
    }
    say("saved", {{"versions", load(plenty_)}, {"left", left}});
  }

  void save(int64_t version) { save(version, plenty_); }

  // Over a slow link.
  void save_and_load(int64_t version) {
    const auto started = std::chrono::steady_clock::now();
    save(version, plenty_);
    const std::set<int64_t> found = load(plenty_);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - started;
    say("slow", {{"versions", found}, {"seconds", took.count()}});
  }

  // Waits until one of these files exists, and returns its name.
  std::string wait_for_one(const std::vector<std::string>& names) const {
    while (true) {
      for (const std::string& name : names) {
        if (std::filesystem::exists(folder_ / name)) return name;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }
  void wait_for(const std::string& name) const { wait_for_one({name}); }

 private:
  void save(int64_t version, double timeout) {
    const Part rows(0, comm_);
    rows.for_each([&](int64_t& element, int64_t index) { element = version * kElements + index; });
    SaveOptions options;
    options.overwrite = true;
    options.progress = [this](const Progress& progress) { on_progress(progress); };
    options.comm = comm_;
    options.timeout = timeout;
    enter("meet", "orders");
    SteppedSave planned = begin_save(state_of(rows), location_, options);
    hold("stage");
    SteppedSave written = planned.stage().write();
    enter("report", "reports");
    SteppedSave reported = written.report();
    enter("publish", "outcome");
    reported.publish();
  }

  // Loads columns of what was saved as rows. Returns the versions of the elements; -1 stands for an
  // element of another place.
  std::set<int64_t> load(double timeout) {
    const Part columns(1, comm_);
    columns.for_each([](int64_t& element, int64_t) { element = -kElements; });
    LoadOptions options;
    options.progress = [this](const Progress& progress) { on_progress(progress); };
    options.comm = comm_;
    options.timeout = timeout;
    enter("meet", "open");
    tilestone::load(state_of(columns), location_, options);
    std::set<int64_t> versions;
    columns.for_each([&](int64_t element, int64_t index) {
      const int64_t first = element - index;
      versions.insert(first % kElements == 0 ? first / kElements : -1);
    });
    return versions;
  }

  StateDict state_of(const Part& part) {
    return part.state([this] { hold("plan"); }, [this] { hold("merge"); });
  }

  // Writes a line for the test.
  void say(const std::string& what, json line) {
    if (said_ < 0) {
      const auto pipe = folder_ / ("said-" + std::to_string(comm_.rank()));
      said_ = ::open(pipe.c_str(), O_WRONLY | O_CLOEXEC);
    }
    line["what"] = what;
    const std::string text = line.dump() + "\n";
    if (::write(said_, text.data(), text.size()) == static_cast<ssize_t>(text.size())) return;
    std::perror("lost_host_rank");
    std::abort();
  }

  bool is_at(const std::string& point) const {
    return !point.empty() && case_.ends_with(": " + point);
  }

  // Waits once until the host is lost, if this is to happen at this point.
  void hold(const std::string& point) {
    if (!is_at(point)) return;
    const std::string name = std::exchange(case_, "");
    say("inside", json::object());
    wait_for("cut " + name);
  }

  // Called before a call in which the ranks wait for one another. `gathers`: the point that rank 0
  // reaches when it has gathered.
  void enter(const std::string& call, const std::string& gathers) {
    gathers_ = gathers;
    const bool waits_for_host = is_at(call) && comm_.rank() < kRanksOfHost;
    const bool waits_for_coordinator = is_at(gathers) && comm_.rank() != 0;
    if (waits_for_host || waits_for_coordinator) {
      case_.clear();
      say("inside", json::object());
    }
    hold(call);
  }

  // Called before each transfer in which every rank sends to every other: TRANSFERS.
  void enter_transfer() {
    ++transfers_;
    if (transfers_ == 1) enter("requests", "");
    if (transfers_ == 3) enter("tiles", "");
  }

  void on_progress(const Progress& progress) {
    const bool writes = progress.phase == "write";
    if (writes) hold("write");
    if (progress.bytes_done == progress.bytes_total) hold(writes ? "written" : "read");
  }

  const Communicator comm_;
  const std::filesystem::path folder_;
  const Location location_;
  const double timeout_, plenty_;  // seconds
  std::string case_;               // empty once this rank has reached the case's point
  std::string gathers_;
  int transfers_ = 0;  // of this call so far
  int said_ = -1;
};

void take_part(const std::filesystem::path& folder, double timeout, double plenty,
               const std::vector<std::string>& cases) {
  const Deadline deadline = Deadline::after(std::chrono::duration<double>(plenty));
  const Communicator comm = mpi_world(deadline);
  // Connects every rank with every other. Open MPI connects two ranks at their first message, and
  // does not survive a failure of that.
  comm.all_to_all(std::vector<Bytes>(static_cast<size_t>(comm.size()), Bytes(1)), deadline);
  Member member(comm, folder, timeout, plenty);
  member.save(0);
  // Version 2n - 1 is saved in the n-th case and version 2n after it.
  int64_t version = 0;
  for (const std::string& name : cases) {
    member.lose_host(name, version + 1);
    member.wait_for("restored " + name);
    if (name == "save: plan") member.save(version + 1);
    member.go_on(version += 2);
  }
  if (member.wait_for_one({"slow", "end"}) == "end") return;
  member.save_and_load(kOverSlowLink);
  member.wait_for("end");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: lost_host_rank FOLDER TIMEOUT PLENTY CASE...\n");
    return 2;
  }
  try {
    take_part(argv[1], std::stod(argv[2]), std::stod(argv[3]), {argv + 4, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "lost_host_rank: %s\n", error.what());
    return 1;
  }
  return 0;
}
