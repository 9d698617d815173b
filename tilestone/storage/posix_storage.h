// Files in a directory of a POSIX file system, with io_uring and direct I/O where they are to be
// had and plain calls where not.
#pragma once

#include <memory>
#include <string>

#include "tilestone/storage/storage.h"

namespace tilestone {

struct PosixOptions {
  enum class Calls { kAuto, kUring, kPlain };  // kAuto: io_uring if the kernel lets us, else plain
  enum class Cache { kAuto, kDirect, kBuffered };
  // Which regular files are read through a symbolic link that leads out of the root. (Links that
  // stay inside are followed; nothing is written, renamed or removed through one that leads out.)
  enum class Links {
    kHub,  // those in a directory "blobs" that stands beside the root or beside one of the
           // directories above it: the layout of the Hugging Face hub's cache
    kAll,  // all: for a root whose maker is trusted as much as the reader
  };
  Calls calls = Calls::kAuto;
  // kAuto writes large files directly and small ones, and all on FUSE, in order through the page
  // cache; reads what is cached from the cache and the rest directly. kDirect is a wish: where the
  // file system refuses O_DIRECT (tmpfs) the page cache is used, which is said once in the log.
  Cache write_cache = Cache::kAuto;
  Cache read_cache = Cache::kAuto;
  unsigned queue_depth = 8;  // requests under way for one file or one reading thread
  Links links = Links::kHub;
};

// The directory need not exist yet: make_directory("") makes it.
std::shared_ptr<Storage> posix_storage(const std::string& root, const PosixOptions& options = {});

}  // namespace tilestone
