// kill_saver threads|mpi DIR KIND FIRST TIMEOUT: saves until it is killed; see save_for_ever().
// With `async_threads` or `async_mpi` it saves in the background.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "kill_content.h"
#include "tilestone/comm/threads_testing.h"

int main(int argc, char** argv) {
  using namespace tilestone;
  if (argc != 6) {
    std::fprintf(stderr,
                 "usage: kill_saver [async_]threads|mpi DIR torch|megatron|zarr FIRST TIMEOUT\n");
    return 2;
  }
  set_log_level(LogLevel::kOff);  // the judge reads only the logs of Places
  const kills::Places places{argv[2]};
  const kills::Kind kind = kills::kind_named(argv[3]);
  const int64_t first = std::atoll(argv[4]);
  const double timeout = std::atof(argv[5]);
  const std::string ranks = argv[1];
  const bool in_background = ranks.starts_with("async_");
  if (ranks.ends_with("mpi")) {
    kills::save_for_ever(mpi_world(), places, kind, first, timeout, in_background);
    return 0;
  }
  run_ranks(3, [&](const Communicator& comm) {
    kills::save_for_ever(comm, places, kind, first, timeout, in_background);
  });
  return 0;
}
