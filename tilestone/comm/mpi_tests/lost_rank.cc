// lost_rank kill|stop: the last rank kills or stops itself between two operations (SIGKILL,
// SIGSTOP). Every other rank prints the error that it gets and the seconds until then. It exits
// with 0 if the error is the expected one.
#include <chrono>
#include <csignal>
#include <cstdio>
#include <string>

#include "tilestone/base/error.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/comm/together_testing.h"

namespace {

using tilestone::Bytes;
using tilestone::Communicator;
using tilestone::Deadline;
using tilestone::Error;
using tilestone::ErrorCode;

constexpr double kDeadlineSeconds = 2;

int survive(const Communicator& world, int victim) {
  const auto start = std::chrono::steady_clock::now();
  try {
    const std::vector<Bytes> parts(static_cast<size_t>(world.size()), Bytes(1000));
    world.all_to_all(parts, Deadline::after(std::chrono::duration<double>(kDeadlineSeconds)));
  } catch (const Error& error) {
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    std::printf("survivor %d after %.1f s: %s\n", world.rank(), took.count(), error.what());
    std::fflush(stdout);
    const bool typed =
        error.code() == ErrorCode::kTimeout || error.code() == ErrorCode::kRankFailed;
    return typed && error.rank() == victim ? 0 : 1;
  }
  std::printf("rank %d: no error\n", world.rank());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  const bool stop = argc > 1 && std::string(argv[1]) == "stop";
  const Communicator world = tilestone::mpi_world();
  const int victim = world.size() - 1;
  all_arrive(world, Deadline::after(std::chrono::seconds(60)));
  if (world.rank() == victim) std::raise(stop ? SIGSTOP : SIGKILL);
  return survive(world, victim);
}
