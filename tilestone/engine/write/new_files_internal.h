// New files where nobody looks for a checkpoint yet: a fresh directory, or one that lacks its
// switch. So they need no rename each: every file is made durable under its own name, and then the
// directories are, each once.
#pragma once

#include <functional>
#include <set>
#include <span>
#include <string>

#include "tilestone/base/bytes.h"
#include "tilestone/base/deadline.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// The directories that files of a storage lie in. A set of them starts with the root.
class Directories {
 public:
  void add_parents_of(const std::string& file);
  // Makes those that are not there, parents first.
  void make(Storage& storage) const;
  // Returns when the entries of all are durable. `threads`: as SaveOptions::threads.
  void sync(Storage& storage, int threads) const;

 private:
  std::set<std::string> names_ = {""};
};

struct NewFile {
  const std::string* name = nullptr;
  ByteView bytes;
};
// Writes the files, whose names are not taken, with their directories; all is durable when it
// returns. `note` is told, by one thread at a time, of each name that may be there from then on,
// also where the call fails.
void write_new_files(Storage& storage, std::span<const NewFile> files, int threads,
                     Deadline deadline, const std::function<void(const std::string&)>& note);

}  // namespace tilestone::engine
