// A host's directory of a fast tier: one folder for each step, `step-00000100-SAVE_ID`, with the
// files that the host's ranks have written, the step's whole index, and the file `.kept`
// (KeptStep), which is put last: without it the folder is a leftover.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/engine/save/kept_step_internal.h"
#include "tilestone/format/manifest.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

inline constexpr const char* kKeptName = ".kept";

// A step of which this host has something.
struct HeldStep {
  KeptStep about;
  std::string folder;
  std::vector<uint32_t> here;  // which of about.files, whole by their sizes
};

// Thread-safe.
class HostFolder {
 public:
  explicit HostFolder(std::shared_ptr<Storage> root) : root_(std::move(root)) {}

  const std::shared_ptr<Storage>& root() const { return root_; }
  static std::string folder_of(uint64_t step, const std::string& save_id);
  std::shared_ptr<Storage> at(const std::string& folder) const { return root_->child(folder); }

  // By ordinal, ascending. What can't be read is logged and left out.
  std::vector<HeldStep> list() const;
  std::optional<HeldStep> find(const std::string& save_id) const;
  HeldStep get(const std::string& save_id) const;  // Error(kNotFound): it is there no more
  Manifest manifest(const HeldStep& held) const;
  KeptIndex read(const HeldStep& held) const { return read(*at(held.folder), held.about); }
  static KeptIndex read(Storage& step, const KeptStep& about);
  // Makes the index durable, `.kept` last.
  void keep(const std::string& folder, const KeptIndex& index, const Deadline& deadline) const;
  // Failures are logged.
  void remove(const std::string& folder) const noexcept;
  // Removes the folders without `.kept`, which saves have left that were killed.
  void remove_leftovers() const;

 private:
  std::shared_ptr<Storage> root_;
};

}  // namespace tilestone::engine
