// Memory of one process that others on its host can read.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "tilestone/base/bytes.h"

namespace tilestone {

class SharedMemory {
 public:
  // New memory of this process. Its pages are made when they are touched. Null: the system has
  // none.
  static std::unique_ptr<SharedMemory> make(uint64_t bytes);
  // The memory that a process has made and still has. Null: it is none that this process may read,
  // as one on another host or in another container.
  static std::unique_ptr<SharedMemory> find(const std::string& name);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // For find(). Empty for memory that was found.
  const std::string& name() const { return name_; }
  // Of memory that was found: only to be read.
  MutableByteView bytes() const { return bytes_; }

 private:
  SharedMemory(int fd, uint64_t bytes, std::string name);

  const int fd_;  // closed, of memory that was found
  const std::string name_;
  MutableByteView bytes_;
};

}  // namespace tilestone
