// overwrites save DIR: saves a checkpoint of each kind below DIR, on three ranks.
// overwrites overwrite DIR yes|no: overwrites them on two ranks. "yes": the directories of these
// checkpoints can be exchanged with new ones, so every overwrite must succeed. "no": they can't. A
// save that needs an exchange must then fail on every rank with an error that says what to do, and
// the existing checkpoint must stay as it is. Every checkpoint is loaded by four ranks, in another
// layout.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/kills/kill_content.h"
#include "tilestone/base/error.h"
#include "tilestone/comm/threads_testing.h"

namespace tilestone::kills {
namespace {

constexpr int kSavers = 3;
constexpr int kOverwriters = 2;
constexpr char kDead[] = ".tilestone-01234567-89ab-4cde-8f01-23456789abcd";  // end of a name
constexpr int64_t kRow = 3 << 17;  // elements: 3 MiB, so that the rows are written directly

std::string location_of(const std::string& root, Kind kind) {
  return root + "/" + std::string(to_string(kind));
}

void expect(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

// Saves on `ranks` ranks and returns the save id.
std::string save_by(int ranks, const std::string& location, Kind kind, int64_t generation) {
  std::string id;
  run_ranks(ranks, [&](const Communicator& comm) {
    SaveOptions options = options_of(kind);
    options.comm = comm;
    options.resources.threads = 1;
    const SaveResult result = save(state_of(comm, generation, kRow), location, options);
    if (comm.is_coordinator()) id = result.save_id;
  });
  return id;
}

void expect_whole(const std::string& location, Kind kind, int64_t generation) {
  expect(whole_generation(location, kind) == generation,
         location + ": not generation " + std::to_string(generation));
}

void save_all(const std::string& root) {
  for (const Kind kind : kKinds) {
    save_by(kSavers, location_of(root, kind), kind, 1);
    expect_whole(location_of(root, kind), kind, 1);
  }
}

std::vector<std::string> names_below(const std::string& directory) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
    names.push_back(entry.path().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

// `kind` is that of the new checkpoint; `standing` that of the existing one.
void expect_refused(const std::string& root, Kind standing, Kind kind) {
  const std::string location = location_of(root, standing);
  const auto before = names_below(root);
  std::vector<std::exception_ptr> errors(kOverwriters);
  run_ranks(kOverwriters, [&](const Communicator& comm) {
    SaveOptions options = options_of(kind);
    options.comm = comm;
    options.resources.threads = 1;
    try {
      save(state_of(comm, 2, kRow), location, options);
    } catch (...) {
      errors[static_cast<size_t>(comm.rank())] = std::current_exception();
    }
  });
  for (const std::exception_ptr& thrown : errors) {
    expect(thrown != nullptr, location + " was overwritten without an exchange");
    try {
      std::rethrow_exception(thrown);
    } catch (const Error& error) {
      const bool is_clear = error.code() == ErrorCode::kUnsupported &&
                            error.hint() == "save to a directory that does not exist yet" &&
                            std::string(error.what()).find("exchange") != std::string::npos;
      expect(is_clear, location + ": another error: " + error.what());
    }
  }
  expect(names_below(root) == before, location + ": a refused save has left or removed files");
  expect_whole(location, standing, 1);
}

void expect_overwritten(const std::string& location, Kind kind) {
  save_by(kOverwriters, location, kind, 2);
  expect_whole(location, kind, 2);
  save_by(kOverwriters, location, Kind::kTorch, 3);  // also exchanges, to replace the other kinds
  expect_whole(location, Kind::kTorch, 3);
  save_and_expect_no_leftovers(location, kind, 4);
}

// What the error's hint names: a directory that does not exist yet. An empty one is as good. A dead
// save has left a directory beside it.
void expect_saved_elsewhere(const std::string& root, Kind kind) {
  for (const bool exists : {false, true}) {
    const std::string name = std::string(to_string(kind)) + (exists ? ".empty" : ".absent");
    const std::string location = root + "/" + name;
    if (exists) std::filesystem::create_directory(location);
    std::filesystem::copy(location_of(root, kind), root + "/." + name + kDead,
                          std::filesystem::copy_options::recursive);
    const std::string id = save_by(1, location, kind, 2);
    expect_whole(location, kind, 2);
    expect_no_leftovers(location, kind, id);
  }
}

void overwrite_all(const std::string& root, bool can_exchange) {
  for (const Kind kind : kKinds) {
    if (kind == Kind::kTorch || can_exchange) {
      expect_overwritten(location_of(root, kind), kind);
    } else {
      expect_refused(root, kind, kind);
      expect_refused(root, kind, Kind::kTorch);
      expect_saved_elsewhere(root, kind);
    }
  }
}

int run(const std::vector<std::string>& words) {
  if (words.size() == 2 && words[0] == "save") {
    save_all(words[1]);
    return 0;
  }
  if (words.size() == 3 && words[0] == "overwrite" && (words[2] == "yes" || words[2] == "no")) {
    overwrite_all(words[1], words[2] == "yes");
    std::puts(words[2] == "yes" ? "every kind is overwritten and loaded by other ranks"
                                : "what needs an exchange is refused and stays whole");
    return 0;
  }
  std::fprintf(stderr, "usage: overwrites save DIR | overwrites overwrite DIR yes|no\n");
  return 2;
}

}  // namespace
}  // namespace tilestone::kills

int main(int argc, char** argv) {
  try {
    return tilestone::kills::run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "overwrites: %s\n", error.what());
    return 1;
  }
}
