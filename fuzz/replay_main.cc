// fuzz_replay TARGET PATH...: runs a fuzz target once over every file on the command line, and over
// every file of each folder on the command line. Folders may be missing, but having no file at all
// is a failure, so that a lost corpus is noticed.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#define FUZZ_TARGET(name) extern "C" int fuzz_##name(const uint8_t* data, size_t size);
#include "fuzz_targets.inc"
#undef FUZZ_TARGET

namespace {

namespace fs = std::filesystem;

using Target = int (*)(const uint8_t* data, size_t size);

const std::map<std::string, Target> kTargets = {
#define FUZZ_TARGET(name) {#name, fuzz_##name},
#include "fuzz_targets.inc"
#undef FUZZ_TARGET
};

std::vector<fs::path> inputs_of(const fs::path& path) {
  if (!fs::is_directory(path))
    return fs::exists(path) ? std::vector{path} : std::vector<fs::path>{};
  std::vector<fs::path> files;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(path)) {
    if (entry.is_regular_file()) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

void replay(Target target, const fs::path& file) {
  std::ifstream stream(file, std::ios::binary);
  std::vector<char> text((std::istreambuf_iterator<char>(stream)),
                         std::istreambuf_iterator<char>());
  const std::vector<uint8_t> bytes(text.begin(), text.end());
  target(bytes.data(), bytes.size());
}

}  // namespace

int main(int argc, char** argv) {
  const auto target = kTargets.find(argc > 1 ? argv[1] : "");
  if (target == kTargets.end()) {
    std::fprintf(stderr, "usage: fuzz_replay TARGET PATH...; targets:");
    for (const auto& [name, run] : kTargets) std::fprintf(stderr, " %s", name.c_str());
    std::fprintf(stderr, "\n");
    return 2;
  }
  size_t count = 0;
  for (int i = 2; i < argc; ++i) {
    for (const fs::path& file : inputs_of(argv[i])) {
      std::fprintf(stderr, "%s\n", file.c_str());
      replay(target->second, file);
      ++count;
    }
  }
  std::printf("replayed %zu inputs\n", count);
  return count > 0 ? 0 : 1;
}
