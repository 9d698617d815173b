// Directories that programs share: locks on names in them, and paths that are none.
#include "tilestone/storage/storage.h"
#include "python/src/bindings.h"
#include "tilestone/engine/run/options_internal.h"

namespace tilestone::python {
namespace {

using nb::literals::operator""_a;

class NameLock {
 public:
  explicit NameLock(std::unique_ptr<StorageLock> held) : held_(std::move(held)) {}
  void release() {
    const nb::gil_scoped_release released;
    held_.reset();
  }

 private:
  std::unique_ptr<StorageLock> held_;
};

nb::object try_lock(const nb::bytes& directory, const std::string& name) {
  const Location location = location_of(directory, false);
  std::unique_ptr<StorageLock> held;
  {
    const nb::gil_scoped_release released;
    const size_t folder = name.rfind('/');
    location.storage().make_directory(folder == std::string::npos ? "" : name.substr(0, folder));
    held = location.storage().try_lock(name);
  }
  return held == nullptr ? nb::none() : nb::cast(NameLock(std::move(held)));
}

bool is_locked(const nb::bytes& directory, const std::string& name) {
  const Location location = location_of(directory, false);
  const nb::gil_scoped_release released;
  return location.storage().is_locked(name);
}

}  // namespace

void bind_storage(nb::module_& m) {
  nb::class_<NameLock>(m, "NameLock",
                       "A lock that try_lock() returned. It is released with the object or at the "
                       "end of the process. A forked child does not hold it.")
      .def("release", &NameLock::release, "Releases the lock; does nothing the second time.");
  m.def(
      "try_lock", &try_lock, "directory"_a, "name"_a,
      nb::sig("def try_lock(directory: bytes, name: str) -> NameLock | None"),
      "Locks a name in a directory; returns None if the lock is held already. Creates the file and "
      "the directories that it needs; they are not removed.\n"
      "Raises UnsupportedError if the file system can't lock files.");
  m.def("is_locked", &is_locked, "directory"_a, "name"_a,
        "Whether anybody, including the caller, holds the lock. Creates and changes nothing.\n"
        "Raises UnsupportedError if the file system can't lock files.");
  m.def(
      "refuse_url", [](const nb::bytes& path) { engine::refuse_url(path_of(path)); }, "path"_a,
      "Raises UnsupportedError if the path is a URL, as it was written or as pathlib shortens it.");
}

}  // namespace tilestone::python
