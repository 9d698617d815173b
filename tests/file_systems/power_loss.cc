// power_loss save DIR: performs in DIR all operations that must be durable once the call returns.
// power_loss judge DIR: run after the file system was shut down and mounted again. Checks that all
// of these changes exist, and that data that was never synced does not: otherwise the shutdown has
// not lost anything, and the test proves nothing.
#include <cstdio>
#include <filesystem>
#include <stdexcept>
#include <string>

#include "tests/kills/kill_content.h"
#include "tilestone/base/error.h"
#include "tilestone/storage/directories.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/storage.h"

namespace tilestone::kills {
namespace {

constexpr int64_t kGeneration = 2;  // of the last save

std::string checkpoint_of(const std::string& root, Kind kind) {
  return root + "/checkpoint." + std::string(to_string(kind));
}

// Without an exchange of directories only checkpoints of the first kind can be overwritten.
int64_t last_generation(Storage& storage, Kind kind) {
  const bool can = kind == Kind::kTorch || storage.directories()->can_exchange();
  return can ? kGeneration : 1;
}

void put(Storage& storage, const std::string& name, const std::string& text) {
  const auto file = storage.create(name);
  file->append(as_bytes(text));
  file->sync(Deadline::never());
  file->close();
}

void put_directory(Storage& storage, const std::string& directory, const std::string& text) {
  storage.directories()->make(directory);
  put(storage, directory + "/f", text);
  storage.settle(directory);
}

void save_all(const std::string& root) {
  const auto storage = posix_storage(root);
  storage->directories()->make("");
  for (const Kind kind : kKinds) {
    for (int64_t generation = 1; generation <= last_generation(*storage, kind); ++generation) {
      save(state_of(solo(), generation), checkpoint_of(root, kind), options_of(kind));
    }
  }
  for (const char* text : {"old", "new"}) {
    storage->publish("published", "temporary", as_bytes(text), true, Deadline::never());
  }
  put_directory(*storage, "exchanged", "old");
  put_directory(*storage, ".exchanged.new", "new");
  put_directory(*storage, "renamed.new", "new");
  put_directory(*storage, "removed", "old");
  storage->settle("");
  if (storage->directories()->can_exchange()) {
    storage->directories()->exchange("exchanged", ".exchanged.new");
  }
  storage->remove_tree("removed");
  storage->settle("");
  storage->directories()->rename("renamed.new", "renamed");
  storage->child("made/child")->directories()->make("");
  storage->create("unsynced")->append(as_bytes("lost"));
}

void expect(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error("after the power loss: " + what);
}

void judge(const std::string& root) {
  const auto storage = posix_storage(root);
  const auto text = [&](const std::string& name) {
    return std::string(as_text(read_file(*storage, name, 100)));
  };
  for (const Kind kind : kKinds) {
    const std::string location = checkpoint_of(root, kind);
    expect(whole_generation(location, kind) == last_generation(*storage, kind),
           location + " is not the last checkpoint");
  }
  expect(text("published") == "new", "the published file is missing");
  const bool exchanged = storage->directories()->can_exchange();
  expect(text("exchanged/f") == (exchanged ? "new" : "old"), "the exchange was lost");
  expect(text(".exchanged.new/f") == (exchanged ? "old" : "new"), "half of the exchange was lost");
  expect(text("renamed/f") == "new", "the renamed directory is missing");
  expect(!storage->stat("renamed.new"), "the renamed directory still has its old name too");
  expect(!storage->stat("removed"), "the removed directory exists again");
  expect(storage->stat("made/child").has_value(), "the root of a child storage is missing");
  const auto unsynced = storage->stat("unsynced");
  expect(!unsynced || unsynced->size == 0, "nothing was lost: unsynced data survived");
}

}  // namespace
}  // namespace tilestone::kills

int main(int argc, char** argv) {
  const std::string what = argc == 3 ? argv[1] : "";
  try {
    if (what == "save") {
      tilestone::kills::save_all(argv[2]);
    } else if (what == "judge") {
      tilestone::kills::judge(argv[2]);
      std::puts("after a power loss all acknowledged changes exist");
    } else {
      std::fprintf(stderr, "usage: power_loss save|judge DIR\n");
      return 2;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "power_loss: %s\n", error.what());
    return 1;
  }
  return 0;
}
