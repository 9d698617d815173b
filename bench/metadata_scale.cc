// Measures reading and writing of torch's `.metadata`, in memory:
//
//   metadata_scale FILE OUT
//
// Parses FILE, writes the result to OUT, and prints the CPU time of both steps as JSON (medians of
// three runs).
#include <time.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>

#include "tilestone/base/error.h"
#include "tilestone/format/torch_dist/metadata_reader_internal.h"
#include "tilestone/format/torch_dist/metadata_writer_internal.h"

namespace {

using namespace tilestone;

// `work` returns its result, so that freeing it is not timed; pickle's result isn't timed either.
template <typename Work>
double median_seconds(const Work& work) {
  std::array<double, 3> seconds = {};
  for (double& s : seconds) {
    const auto now = [] {
      timespec time = {};
      clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
      return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
    };
    const double begin = now();
    const auto made = work();
    s = now() - begin;
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[1];
}

int run(const char* from, const char* to) {
  std::ifstream in(from, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  const double parse = median_seconds([&] { return torch_dist::parse_metadata(as_bytes(text)); });
  const Metadata metadata = torch_dist::parse_metadata(as_bytes(text));
  const double write = median_seconds([&] { return torch_dist::write_metadata(metadata); });
  const Bytes written = torch_dist::write_metadata(metadata);
  std::ofstream(to, std::ios::binary)
      .write(as_text(written).data(), static_cast<std::streamsize>(written.size()));
  size_t chunks = 0;
  for (const StoredTensor& tensor : metadata.tensors) chunks += tensor.chunks.size();
  std::printf(
      "{\"parse_seconds\": %.4f, \"write_seconds\": %.4f, \"bytes\": %zu, "
      "\"tensors\": %zu, \"shards\": %zu}\n",
      parse, write, text.size(), metadata.tensors.size(), chunks);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: metadata_scale FILE OUT\n");
    return 2;
  }
  try {
    return run(argv[1], argv[2]);
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
