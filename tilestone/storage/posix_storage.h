// A storage of files in a directory of a POSIX file system. It uses io_uring and direct I/O where
// they are available, and plain system calls and the page cache elsewhere.
#pragma once

#include <memory>
#include <string>

#include "tilestone/storage/storage.h"

namespace tilestone {

struct PosixOptions {
  // kAuto: io_uring if the kernel allows it, else plain system calls. kUring: Error(kUnsupported)
  // if the kernel does not allow it.
  enum class Calls { kAuto, kUring, kPlain };
  enum class Cache { kAuto, kDirect, kBuffered };
  // Which regular files may be read through a symbolic link that leads out of the root. Links that
  // stay inside the root are always followed, and so are absolute links to files inside it. Nothing
  // is ever written, renamed or removed through a link that leads out.
  enum class Links {
    kHub,  // files in a directory "blobs" next to the root or next to a directory above it: the
           // layout of the Hugging Face hub's cache
    kAll,  // all files; only for a root whose creator is trusted as much as the reader
  };
  Calls calls = Calls::kAuto;
  // kAuto writes large files by direct I/O, and small files and all files on FUSE in order through
  // the page cache. It reads cached ranges from the page cache and the rest by direct I/O. kDirect
  // is only a request: if the file system refuses O_DIRECT (tmpfs), the page cache is used, and a
  // warning is logged once.
  Cache write_cache = Cache::kAuto;
  Cache read_cache = Cache::kAuto;
  unsigned queue_depth = 8;  // most requests in progress per written file and per reading thread
  Links links = Links::kHub;
};

// The directory `root` need not exist yet: make_directory("") makes it.
std::shared_ptr<Storage> posix_storage(const std::string& root, const PosixOptions& options = {});

}  // namespace tilestone
