// Writes new files that no reader looks for yet: in a fresh directory, or for an index that lacks
// its switch. They need no temporary file and rename. Every file is made durable under its final
// name, and then each directory is synced once.
#pragma once

#include <functional>
#include <set>
#include <span>
#include <string>

#include "tilestone/base/bytes.h"
#include "tilestone/base/deadline.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// A set of directories of a storage. It always contains the root.
class FileParents {
 public:
  void add_parents_of(const std::string& file);
  // Makes the entries of all directories durable. `threads`: as SaveOptions::threads.
  void sync(Storage& storage, int threads) const;

 private:
  std::set<std::string> names_ = {""};
};

struct NewFile {
  const std::string* name = nullptr;
  ByteView bytes;
};
// Makes the files and their directories. None of the files may exist before. All are durable when
// the call returns. Calls `note`, from one thread at a time, with each name that may exist from
// then on, even if the call fails.
void write_new_files(Storage& storage, std::span<const NewFile> files, int threads,
                     Deadline deadline, const std::function<void(const std::string&)>& note);

}  // namespace tilestone::engine
