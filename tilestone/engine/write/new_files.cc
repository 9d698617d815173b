#include <mutex>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/base/thread_pool.h"
#include "tilestone/engine/run/resources_internal.h"
#include "tilestone/engine/write/new_files_internal.h"

namespace tilestone::engine {
namespace {

// With fewer files, threads are not worth their cost. With more, most of the time is spent waiting
// for the disk, and waiting for many files at once takes little longer than waiting for one.
constexpr size_t kWorthThreads = 16;

template <typename Body>
void for_each(size_t count, int threads, const Body& body) {
  const size_t at_once = files_at_once(thread_count(threads));
  if (count >= kWorthThreads && at_once > 1) {
    ThreadPool(at_once).parallel_for(count, body);
  } else {
    for (size_t i = 0; i < count; ++i) body(i);
  }
}

}  // namespace

void FileParents::add_parents_of(const std::string& file) {
  for (size_t slash = file.find('/'); slash != std::string::npos;
       slash = file.find('/', slash + 1)) {
    names_.insert(file.substr(0, slash));
  }
}

void FileParents::sync(Storage& storage, int threads) const {
  const std::vector<std::string> names(names_.begin(), names_.end());
  for_each(names.size(), threads, [&](size_t i) { storage.settle(names[i]); });
}

void write_new_files(Storage& storage, std::span<const NewFile> files, int threads,
                     Deadline deadline, const std::function<void(const std::string&)>& note) {
  if (files.empty()) return;
  FileParents directories;
  for (const NewFile& file : files) directories.add_parents_of(*file.name);
  std::mutex mutex;
  const auto note_one = [&](const std::string& name) {
    std::lock_guard lock(mutex);
    note(name);
  };
  for_each(files.size(), threads, [&](size_t i) {
    const std::string& name = *files[i].name;
    if (deadline.expired()) {
      throw Error(ErrorCode::kTimeout, "the deadline passed before a file was written")
          .with_file(name);
    }
    try {
      storage.make_file(name, files[i].bytes, deadline);
    } catch (const Error& error) {
      // On kAlreadyExists the file belongs to somebody else.
      if (error.code() != ErrorCode::kAlreadyExists) note_one(name);
      throw;
    }
    note_one(name);
  });
  directories.sync(storage, threads);
}

}  // namespace tilestone::engine
