// Locks on names in a directory, by which programs that share it keep out of each other's way.
#include "python/src/bindings.h"

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
                       "A lock that try_lock() gave. It goes with the object or the process; a "
                       "forked child has no part in it.")
      .def("release", &NameLock::release, "Gives it up; once more does nothing.");
  m.def("try_lock", &try_lock, "directory"_a, "name"_a,
        nb::sig("def try_lock(directory: bytes, name: str) -> NameLock | None"),
        "A lock on a name in a directory, or None when somebody else holds it. Makes the file and "
        "the directories that it needs; they stay.\n"
        "UnsupportedError where files can't be locked.");
  m.def("is_locked", &is_locked, "directory"_a, "name"_a,
        "Whether somebody, who may be the caller, holds the lock. Makes and changes nothing.\n"
        "UnsupportedError where files can't be locked.");
}

}  // namespace tilestone::python
