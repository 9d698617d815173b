// A storage of files in a directory of a POSIX file system. It uses io_uring and direct I/O where
// they are available, and plain system calls and the page cache elsewhere.
#pragma once

#include <memory>
#include <string>

#include "tilestone/storage/storage.h"

namespace tilestone {

struct PosixOptions {
  // Which regular files may be read through a symbolic link that leads out of the root. Links that
  // stay inside the root are always followed, and so are absolute links to files inside it. Nothing
  // is ever written, renamed or removed through a link that leads out.
  enum class Links {
    kHub,  // files in a directory "blobs" next to the root or next to a directory above it: the
           // layout of the Hugging Face hub's cache
    kAll,  // all files; only for a root whose creator is trusted as much as the reader
  };
  // The smallest file that is written, and the smallest range that is read, by direct I/O (bytes).
  // Small ones, files on FUSE and ranges that are cached pass through the page cache, and so does
  // everything where the file system refuses O_DIRECT (tmpfs), which is logged once.
  uint64_t direct_write = 1u << 20;
  uint64_t direct_read = 16u << 10;
  unsigned queue_depth = 8;  // most requests in progress per written file and per reading thread
  Links links = Links::kHub;
};

// The directory `root` need not exist yet: make_directory("") makes it.
std::shared_ptr<Storage> posix_storage(const std::string& root, const PosixOptions& options = {});

}  // namespace tilestone
