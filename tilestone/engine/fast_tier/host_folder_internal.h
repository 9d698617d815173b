// A host's directory of a fast tier: one folder for each step, `step-00000100-SAVE_ID`, with the
// files that the host's ranks have written, the step's whole index, and the file `.kept`
// (KeptStep), which is put last: without it the folder is a leftover.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tilestone/base/both_ways.h"
#include "tilestone/base/bytes.h"
#include "tilestone/base/deadline.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/engine/save/kept_step_internal.h"
#include "tilestone/engine/training_run/checkpoint_manager.h"
#include "tilestone/engine/training_run/look_internal.h"
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

// ---- What hosts say of the steps that they hold, and what that makes together

// A step as one host or, once they are united, all of them have it.
struct SaidStep {
  uint64_t step = 0;
  std::string save_id;
  Lineage lineage;
  bool drains = false;
  // By data file of the step: the ranks that read it for their hosts, ascending.
  std::vector<std::vector<int>> holders;
  int keeper = 0;  // a rank whose host has the step's index

  bool is_whole() const;
  StepInfo info() const;  // with state kDurable, if it is whole
};

// The message of `rank`.
Bytes say_steps(std::span<const HeldStep> held, int rank);
// By ordinal, ascending. said[r] is the message of rank r; empty: another one speaks for its host.
// Error(kCorrupt) for other bytes.
std::vector<SaidStep> united_steps(std::span<const Bytes> said);

// Every rank calls: the step that `pick` takes, on rank 0, of what the ranks say; nullopt: none.
std::optional<SaidStep> agree_on_step(const Communicator& comm, const std::string& work,
                                      const Deadline& deadline, const std::function<Bytes()>& say,
                                      const std::function<bool(const SaidStep&)>& pick);

// As in base/both_ways.h.
void walk_step(auto& io, auto& step) {
  both::varint(io, step.step);
  both::text(io, step.save_id);
  walk_lineage(io, step.lineage);
  both::u8(io, step.drains);
  both::varint(io, step.keeper);
  both::each(io, step.holders, 1, [&](auto& ranks) {
    both::each(io, ranks, 1, [&](auto& rank) { both::varint(io, rank); });
  });
}

}  // namespace tilestone::engine
