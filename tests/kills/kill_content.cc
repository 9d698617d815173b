#include "kill_content.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>

namespace tilestone::kills {
namespace {

constexpr int64_t kRowElements = 60000;
constexpr int64_t kPlain = 3001;

int64_t element(int64_t generation, int64_t place) { return (generation << 32) + place; }

TensorView numbers(int64_t generation, int64_t first, const Dims& shape) {
  TensorView tensor = TensorView::allocate(DType::kInt64, shape);
  auto* at = reinterpret_cast<int64_t*>(tensor.data);
  for (int64_t i = 0; i < numel(shape); ++i) at[i] = element(generation, first + i);
  return tensor;
}

void expect_numbers(const Checkpoint& checkpoint, const std::string& key, int64_t generation) {
  const TensorView found = checkpoint.read(key);
  const TensorView expected = numbers(generation, 0, found.shape);
  if (std::memcmp(found.data, expected.data, expected.bytes()) == 0) return;
  throw std::runtime_error("\"" + key + "\" is not that of generation " +
                           std::to_string(generation));
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

}  // namespace

StateDict state_of(const Communicator& comm, int64_t generation) {
  StateDict state;
  state["w"] = ShardedTensor::from_rank_offsets(
      "w", numbers(generation, comm.rank() * kRowElements, {1, kRowElements}),
      {{0, comm.rank(), comm.size()}});
  state["p"] = numbers(generation, 0, {kPlain});
  state["step"] = generation;
  return state;
}

int64_t whole_generation(const std::string& location) {
  try {
    const Checkpoint checkpoint = Checkpoint::open(location);
    const int64_t generation = checkpoint.read_object("step").as_int();
    expect_numbers(checkpoint, "w", generation);
    expect_numbers(checkpoint, "p", generation);
    const VerifyReport report = checkpoint.verify();
    if (!report.ok()) throw std::runtime_error(report.damages.front().problem);
    return generation;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kNotFound && !std::filesystem::exists(location + "/.metadata")) {
      return -1;
    }
    throw std::runtime_error(location + ": " + error.what());
  }
}

void save_and_expect_no_leftovers(const std::string& location, int64_t generation) {
  SaveOptions options;
  options.overwrite = true;
  const std::string id = save(state_of(solo(), generation), location, options).save_id;
  if (whole_generation(location) != generation) {
    throw std::runtime_error(location + ": the later save is not found");
  }
  for (const std::string& name : posix_storage(location)->list()) {
    const bool fixed = name == ".metadata" || name == ".tilestone/lock";
    if (!fixed && name.find(id) == std::string::npos) {
      throw std::runtime_error(location + ": " + name + " is a leftover");
    }
  }
}

void save_for_ever(const Communicator& comm, const Places& places, int64_t first, double timeout) {
  const Log log(places.log(comm.rank()));
  log.write("pid " + std::to_string(::getpid()));
  SaveOptions options;
  options.comm = comm;
  options.overwrite = true;
  options.timeout = timeout;
  options.threads = 1;
  options.buffer_bytes = 1u << 20;
  try {
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
