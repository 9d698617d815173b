// What only a file system can do: directories that are swapped, renamed and held open. The storage
// itself uses it for the short forms of Storage. Above it, only the commit of files with fixed
// names does (engine/commit/sibling.cc).
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "tilestone/storage/storage.h"

namespace tilestone {

// Belongs to a storage, which must outlive it. Names are those of the storage. Thread-safe.
class Directories {
 public:
  virtual ~Directories() = default;

  // Makes the directory `name` ("": the root) and its parents. No error if it exists already. The
  // root and the directories above it are durable when the call returns.
  virtual void make(const std::string& name) = 0;
  virtual void remove(const std::string& name) = 0;  // must be empty
  // Returns when all names that were created, renamed or removed in the directory ("": the root)
  // before the call are durable.
  virtual void settle(const std::string& name) = 0;
  // Whether exchange() works here. Where only a trial can tell, the first call makes a temporary
  // directory in the root (".tilestone-probe-...", or in the second of two
  // directories that are to be exchanged), tries it there, removes the directory and keeps
  // the answer. If the trial fails for another reason, the call returns false and the next call
  // tries again.
  virtual bool can_exchange() = 0;
  // Swaps two directories in one step; neither may be within the other. After a crash either both
  // names are swapped or neither is. Durable when the call returns. Error(kUnsupported), with
  // nothing changed, if the file system can't do it or can't do it with these two (a mount point).
  // Error(kUnsafe) if one of them is a link.
  virtual void exchange(const std::string& a, const std::string& b) = 0;
  // Renames the directory `from` to `to` in one step. Durable when the call returns. kAlreadyExists
  // if `to` exists and is not an empty directory. Other errors as in exchange().
  virtual void rename(const std::string& from, const std::string& to) = 0;
  // The same of a file. Atomic, not yet durable when the call returns. With replace == false:
  // kAlreadyExists if `to` exists, and nothing is changed.
  virtual void rename_file(const std::string& from, const std::string& to, bool replace) = 0;
  // Gives the file or directory `name` the permissions of `like`, and its owner if this process
  // may. The owner of a directory always keeps all rights. Does nothing where there are no
  // permissions.
  virtual void copy_permissions(const std::string& name, const std::string& like) = 0;

  // The storage that contains this root as a directory, and the root's name there (one component).
  // Siblings of the root can be made there. Links are resolved, so the name is that of the
  // directory itself. nullopt if there is no parent (the topmost directory) or if it is not known.
  virtual std::optional<StorageEntry> parent() { return std::nullopt; }
  // A storage whose root is the directory that is this root now, even after that directory is
  // renamed or exchanged. kNotFound if the root does not exist. Null: directories can't be held.
  virtual std::shared_ptr<Storage> held() { return nullptr; }
  // For the directories of a storage that held() has returned: whether held() would still return
  // the same one. True for any other. Throws if that can't be found out.
  virtual bool stands() const { return true; }
};

}  // namespace tilestone
