// What storages share that are only read, and whose bytes do not all come from a disk.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>

#include "tilestone/base/bytes.h"
#include "tilestone/base/error.h"
#include "tilestone/storage/storage.h"

namespace tilestone {

// Whatever would make, change, remove or claim a file throws refusal().
class ReadOnlyStorage : public Storage {
 public:
  std::unique_ptr<StorageClaim> claim(const std::string&, const Deadline&) final {
    throw refusal();
  }
  bool is_claimed(const std::string&) final { return false; }
  std::unique_ptr<WritableFile> create(const std::string&, uint64_t, const Deadline&) final {
    throw refusal();
  }
  std::optional<std::string> put_for_tag(const std::string&, ByteView, const Condition&,
                                         const std::string&, Deadline) final {
    throw refusal();
  }
  bool remove_files(std::span<const std::string>, const FileRemoval&) final { throw refusal(); }

 protected:
  virtual Error refusal() const = 0;
};

// Sets the checksums that the op asks for. `bytes`: all of the op's.
void set_checksums(const ReadOp& op, ByteView bytes);

}  // namespace tilestone
