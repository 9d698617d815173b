// mpi_roundtrip DIR: the ranks of an MPI job save a state as rows. They load it as columns, as
// whole tensors (each rank for itself, and in two phases), and as slices of the flattened tensor.
// They save in the background. Then failures of one rank must reach every rank. Prints only errors;
// exits with 0 if there are none.
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/comm/together_testing.h"
#include "tilestone/engine/save/save_steps_testing.h"
#include "tilestone/tilestone.h"

namespace {

using namespace tilestone;

constexpr int64_t kRows = 29;  // prime, so not divisible by the number of ranks
constexpr int64_t kColumns = 301;

struct Slice {
  int64_t begin, count;
};

Slice slice_of(int64_t total, const Communicator& comm) {
  const int64_t begin = total * comm.rank() / comm.size();
  return {begin, total * (comm.rank() + 1) / comm.size() - begin};
}

float element(int64_t row, int64_t column, int64_t first) {
  return static_cast<float>(first + row * kColumns + column);
}

ShardedTensor box_tensor(const Box& box, int64_t first, bool fill) {
  TensorView data = TensorView::allocate(DType::kFloat32, box.shape);
  auto* at = reinterpret_cast<float*>(data.data);
  for (int64_t i = 0; fill && i < box.shape[0]; ++i) {
    for (int64_t j = 0; j < box.shape[1]; ++j) {
      *at++ = element(box.offset[0] + i, box.offset[1] + j, first);
    }
  }
  return ShardedTensor::from_box("w", data, {kRows, kColumns}, box);
}

StateDict rows(const Communicator& comm, int64_t first) {
  const Slice mine = slice_of(kRows, comm);
  StateDict state;
  state["w"] = box_tensor({{mine.begin, 0}, {mine.count, kColumns}}, first, true);
  state["bias"] = TensorView::allocate(DType::kBFloat16, {5});
  state["step"] = first;
  return state;
}

void expect(bool ok, const std::string& what, const Communicator& comm) {
  if (ok) return;
  std::fprintf(stderr, "rank %d of %d: %s\n", comm.rank(), comm.size(), what.c_str());
  std::exit(1);
}

void expect_boxes(const Communicator& comm, const Location& location, const Box& box, int64_t first,
                  Reading::TwoPhase mode = Reading::TwoPhase::kNever) {
  StateDict wanted;
  wanted["w"] = box_tensor(box, first, false);
  wanted["step"] = nullptr;
  LoadOptions options;
  options.comm = comm;
  options.resources.threads = 1;
  options.reading.two_phase = mode;
  const StateDict loaded = load(wanted, location, options);
  const TensorView& data = loaded.find("w")->get_if<ShardedTensor>()->data;
  const TensorView truth = box_tensor(box, first, true).data;
  expect(std::memcmp(data.data, truth.data, truth.bytes()) == 0, "wrong elements", comm);
  expect(*loaded.find("step")->get_if<Value>() == Value(first), "wrong step", comm);
}

void expect_flat(const Communicator& comm, const Location& location, int64_t first) {
  const Slice mine = slice_of(kRows * kColumns, comm);
  StateDict wanted;
  wanted["w"] = ShardedTensor::from_rank_offsets_flat(
      "w", TensorView::without_data(DType::kFloat32, {mine.count}), {kRows, kColumns},
      {mine.begin, mine.begin + mine.count}, {});
  LoadOptions options;
  options.comm = comm;
  options.resources.threads = 1;
  const StateDict loaded = load(wanted, location, options);
  const TensorView& data = loaded.find("w")->get_if<ShardedTensor>()->data;
  const auto* at = reinterpret_cast<const float*>(data.data);
  for (int64_t i = 0; i < mine.count; ++i) {
    expect(at[i] == static_cast<float>(first + mine.begin + i), "wrong flat elements", comm);
  }
}

// How the last rank fails: its state is invalid, or it leaves the save before the named step.
enum class Failing { kState, kStage, kWrite, kReport };

void take_steps(SteppedSave planned, Failing until) {
  if (until == Failing::kStage) return;
  SteppedSave staged = planned.stage();
  if (until == Failing::kWrite) return;
  SteppedSave written = staged.write();
  if (until == Failing::kReport) return;
  written.report().publish();
}

// Expects the error on every rank, and that the existing checkpoint is unchanged.
void expect_failure_everywhere(const Communicator& comm, const Location& location, Session* session,
                               Failing failing) {
  const bool is_last = comm.rank() == comm.size() - 1;
  StateDict state = rows(comm, 0);
  if (is_last && failing == Failing::kState) {
    state["hollow"] = TensorView::without_data(DType::kFloat32, {2});
  }
  SaveOptions options;
  options.comm = comm;
  options.overwrite = true;
  options.timeout = 60;
  std::string text;
  try {
    take_steps(session != nullptr ? begin_save(*session, state, location, options)
                                  : begin_save(state, location, options),
               is_last ? failing : Failing::kState);
  } catch (const Error& error) {
    text = error.what();
  }
  const std::string expected =
      failing == Failing::kState ? "hollow" : "a rank gave up the save before it was";
  const bool leaves = is_last && failing != Failing::kState;
  const bool names_rank = text.find("rank " + std::to_string(comm.size() - 1)) != std::string::npos;
  expect(leaves || (text.find(expected) != std::string::npos && (names_rank || comm.size() == 1)),
         "the error does not name the failure: " + text, comm);
  expect_boxes(comm, location, {{0, 0}, {kRows, kColumns}}, 7);
}

void expect_failures_everywhere(const Communicator& comm, const Location& location) {
  Session session(comm, 60);
  for (Session* const kept : {static_cast<Session*>(nullptr), &session}) {
    SaveOptions options;
    options.comm = comm;
    options.overwrite = true;
    options.timeout = 60;
    for (const Failing failing :
         {Failing::kState, Failing::kStage, Failing::kWrite, Failing::kReport}) {
      if (kept != nullptr) kept->save(rows(comm, 7), location, options);
      expect_failure_everywhere(comm, location, kept, failing);
    }
  }
}

// Saves in the background while the ranks use MPI; a failure reaches every rank; the old checkpoint
// stands meanwhile.
void expect_saves_in_the_background(const Communicator& comm, const Location& location) {
  SaveOptions options;
  options.comm = comm;
  options.overwrite = true;
  options.timeout = 60;
  Session session(comm, 60);
  for (const int64_t first : {21, 22, 23}) {
    StateDict state = rows(comm, first);
    const AsyncSave saving = session.async_save(state, location, options);
    state = rows(comm, 0);
    all_arrive(comm, Deadline::after(std::chrono::seconds(60)));
    if (first == 22) continue;  // the next one waits for it
    expect(saving.result().published, "not published", comm);
    expect_boxes(comm, location, {{0, 0}, {kRows, kColumns}}, first);
  }
  const bool is_last = comm.rank() == comm.size() - 1;
  SaveOptions failing = options;
  if (is_last) failing.progress = [](const Progress&) { throw Error(ErrorCode::kIo, "no disk"); };
  const AsyncSave failed = session.async_save(rows(comm, 24), location, failing);
  std::string text;
  try {
    failed.result();
  } catch (const Error& error) {
    text = error.what();
  }
  expect(text.find("no disk") != std::string::npos, "the failure is not reported: " + text, comm);
  expect_boxes(comm, location, {{0, 0}, {kRows, kColumns}}, 23);
  session.async_save(rows(comm, 7), location, options).result();
}

}  // namespace

int main(int argc, char** argv) {
  const Communicator comm = mpi_world();
  if (argc != 2) {
    if (comm.is_coordinator()) std::fprintf(stderr, "usage: mpi_roundtrip DIR\n");
    return 2;
  }
  try {
    if (comm.is_coordinator()) std::filesystem::remove_all(argv[1]);
    all_arrive(comm, Deadline::after(std::chrono::seconds(60)));
    const Location location{std::string(argv[1])};
    SaveOptions options;
    options.comm = comm;
    save(rows(comm, 1000), location, options);
    options.overwrite = true;
    save(rows(comm, 7), location, options);
    const Slice columns = slice_of(kColumns, comm);
    for (const auto mode : {Reading::TwoPhase::kNever, Reading::TwoPhase::kAlways}) {
      expect_boxes(comm, location, {{0, columns.begin}, {kRows, columns.count}}, 7, mode);
      expect_boxes(comm, location, {{0, 0}, {kRows, kColumns}}, 7, mode);
    }
    expect_flat(comm, location, 7);
    expect_saves_in_the_background(comm, location);
    expect_failures_everywhere(comm, location);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", comm.rank(), error.what());
    return 1;
  }
  return 0;
}
