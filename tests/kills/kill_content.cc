#include "kill_content.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <optional>
#include <set>
#include <stdexcept>

#include "tilestone/comm/threads_testing.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/format.h"
#include "tilestone/format/torch_dist/torch_dist.h"
#include "tilestone/format/zarr/zarr.h"
#include "tilestone/storage/memory_storage_testing.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/storage.h"

namespace tilestone::kills {
namespace {

constexpr int64_t kPlain = 3001;
constexpr int kReaders = 4;  // of a load with another number of ranks than any save has

int64_t element(int64_t generation, int64_t place) { return (generation << 32) + place; }

TensorView numbers(int64_t generation, int64_t first, const Dims& shape) {
  TensorView tensor = TensorView::allocate(DType::kInt64, shape);
  auto* at = reinterpret_cast<int64_t*>(tensor.data);
  for (int64_t i = 0; i < numel(shape); ++i) at[i] = element(generation, first + i);
  return tensor;
}

void expect(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

void expect_equal(const std::string& key, const TensorView& found, const TensorView& expected) {
  const bool same = found.shape == expected.shape && found.dtype == expected.dtype &&
                    std::memcmp(found.data, expected.data, expected.bytes()) == 0;
  expect(same, "\"" + key + "\" is not what was saved");
}

// The columns of rank `rank` out of kReaders.
TensorView columns(int64_t generation, const Dims& whole, int rank) {
  const int64_t width = whole[1] / kReaders;
  TensorView tensor = TensorView::allocate(DType::kInt64, {whole[0], width});
  auto* at = reinterpret_cast<int64_t*>(tensor.data);
  for (int64_t row = 0; row < whole[0]; ++row) {
    for (int64_t i = 0; i < width; ++i) {
      *at++ = element(generation, row * whole[1] + rank * width + i);
    }
  }
  return tensor;
}

// Loads by columns, with kReaders ranks, what was saved by rows.
void expect_loaded(const std::string& location, int64_t generation, const Dims& whole) {
  run_ranks(kReaders, [&](const Communicator& comm) {
    const TensorView expected = columns(generation, whole, comm.rank());
    StateDict wanted;
    wanted["w"] = ShardedTensor::from_rank_offsets(
        "w", TensorView::without_data(DType::kInt64, expected.shape), {{1, comm.rank(), kReaders}});
    wanted["p"] = TensorView::without_data(DType::kInt64, {kPlain});
    wanted["step"] = nullptr;
    LoadOptions options;
    options.comm = comm;
    options.resources.threads = 1;
    const StateDict loaded = load(wanted, location, options);
    expect_equal("w", loaded.get<ShardedTensor>("w").data, expected);
    expect_equal("p", loaded.get<TensorView>("p"), numbers(generation, 0, {kPlain}));
    expect(loaded.get<int64_t>("step") == generation, "\"step\" is not what was saved");
  });
}

bool has_index(const std::string& location) {
  return std::filesystem::exists(location + "/.metadata") ||
         std::filesystem::exists(location + "/metadata.json");
}

// The names of the files, with "ID" for the save id.
std::multiset<std::string> names_at(Storage& storage, const std::string& save_id) {
  std::multiset<std::string> names;
  for (std::string name : storage.list()) {
    const size_t id = name.find(save_id);
    if (id != std::string::npos) name.replace(id, save_id.size(), "ID");
    names.insert(std::move(name));
  }
  return names;
}

// A log file. Once write() returns, its whole line is in the file.
class Log {
 public:
  explicit Log(const std::string& name)
      : file_(::open(name.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644)) {
    if (file_ < 0) throw std::runtime_error("can't open " + name);
  }
  ~Log() { ::close(file_); }
  Log(const Log&) = delete;
  Log& operator=(const Log&) = delete;
  void write(const std::string& what) const {
    const std::string line = what + "\n";
    if (::write(file_, line.data(), line.size()) != static_cast<ssize_t>(line.size())) {
      throw std::runtime_error("can't write the log");
    }
  }

 private:
  int file_;
};

std::string one_line(std::string text) {
  for (char& c : text) {
    if (c == '\n') c = ' ';
  }
  return text;
}

// The state changes as soon as the call returns. The call for the next generation waits for the
// save in flight, so that one is done when the call returns.
void save_in_background_for_ever(const Log& log, const Places& places, const SaveOptions& options,
                                 int64_t first) {
  const Communicator& comm = options.comm;
  Session session(comm, options.timeout);
  std::optional<AsyncSave> last;
  for (int64_t generation = first;; ++generation) {
    const StateDict state = state_of(comm, generation);
    log.write("begin " + std::to_string(generation));
    AsyncSave saving = session.async_save(state, places.location(generation), options);
    const TensorView& rows = state.get<ShardedTensor>("w").data;
    std::memset(rows.data, 0xff, rows.bytes());
    if (last) {
      last->result();
      log.write("done " + std::to_string(generation - 1));
    }
    last = std::move(saving);
    if (comm.is_coordinator()) std::filesystem::remove_all(places.step(generation - 4));
  }
}

}  // namespace

std::string_view to_string(Kind kind) {
  switch (kind) {
    case Kind::kTorch:
      return "torch";
    case Kind::kMegatron:
      return "megatron";
    case Kind::kZarr:
      return "zarr";
  }
  throw std::runtime_error("no such kind");
}

Kind kind_named(std::string_view name) {
  for (const Kind kind : kKinds) {
    if (to_string(kind) == name) return kind;
  }
  throw std::runtime_error("no kind is named " + std::string(name));
}

SaveOptions options_of(Kind kind) {
  SaveOptions options;
  options.overwrite = true;
  options.format = kind == Kind::kZarr ? zarr_format() : torch_dist_format();
  options.dialect = kind == Kind::kTorch ? pytorch_dialect() : megatron_dialect();
  return options;
}

StateDict state_of(const Communicator& comm, int64_t generation, int64_t row_elements) {
  StateDict state;
  state["w"] = ShardedTensor::from_rank_offsets(
      "w", numbers(generation, comm.rank() * row_elements, {1, row_elements}),
      {{0, comm.rank(), comm.size()}});
  state["p"] = numbers(generation, 0, {kPlain});
  state["step"] = generation;
  return state;
}

int64_t whole_generation(const std::string& location, Kind kind) {
  try {
    const Checkpoint checkpoint = Checkpoint::open(location);
    const SaveOptions options = options_of(kind);
    expect(checkpoint.format().name() == options.format->name() &&
               checkpoint.dialect().name() == options.dialect->name(),
           location + ": the checkpoint is of another kind");
    const auto common = checkpoint.common();
    const Value step = common ? *common->find("step") : checkpoint.read_object("step");
    const int64_t generation = step.as_int();
    const TensorView rows = checkpoint.read("w");
    expect_equal("w", rows, numbers(generation, 0, rows.shape));
    const VerifyReport report = checkpoint.verify();
    if (!report.ok()) throw std::runtime_error(report.damages.front().problem);
    expect_loaded(location, generation, rows.shape);
    return generation;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kNotFound && !has_index(location)) return -1;
    throw std::runtime_error(location + ": " + error.what());
  }
}

void expect_no_leftovers(const std::string& location, Kind kind, const std::string& save_id) {
  const auto fresh = memory_storage();
  const std::string fresh_id = save(state_of(solo(), 0), fresh, options_of(kind)).save_id;
  const auto expected = names_at(*fresh, fresh_id);
  for (const std::string& name : names_at(*posix_storage(location), save_id)) {
    expect(expected.contains(name), location + ": " + name + " is a leftover");
  }
  const std::filesystem::path path(location);
  const std::string siblings = "." + path.filename().string() + ".tilestone-";
  for (const auto& entry : std::filesystem::directory_iterator(path.parent_path())) {
    expect(!entry.path().filename().string().starts_with(siblings),
           entry.path().string() + " is a leftover");
  }
}

void save_and_expect_no_leftovers(const std::string& location, Kind kind, int64_t generation) {
  const std::string id = save(state_of(solo(), generation), location, options_of(kind)).save_id;
  expect(whole_generation(location, kind) == generation,
         location + ": the later save is not found");
  expect_no_leftovers(location, kind, id);
}

void save_for_ever(const Communicator& comm, const Places& places, Kind kind, int64_t first,
                   double timeout, bool in_background) {
  const Log log(places.log(comm.rank()));
  log.write("pid " + std::to_string(::getpid()));
  SaveOptions options = options_of(kind);
  options.comm = comm;
  options.timeout = timeout;
  options.resources.threads = 1;
  options.resources.buffer_bytes = 1u << 20;
  try {
    if (in_background) return save_in_background_for_ever(log, places, options, first);
    for (int64_t generation = first;; ++generation) {
      const StateDict state = state_of(comm, generation);
      log.write("begin " + std::to_string(generation));
      save(state, places.location(generation), options);
      log.write("done " + std::to_string(generation));
      if (comm.is_coordinator()) std::filesystem::remove_all(places.step(generation - 3));
    }
  } catch (const std::exception& error) {
    log.write("failed " + one_line(error.what()));
  }
}

}  // namespace tilestone::kills
