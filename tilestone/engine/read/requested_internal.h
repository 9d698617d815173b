// What one rank requests in a load: the template's tree and the items in it, or all items of the
// checkpoint.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/engine/open/opening_internal.h"
#include "tilestone/engine/read/as_stored_internal.h"
#include "tilestone/engine/read/findings_internal.h"
#include "tilestone/engine/read/places_internal.h"
#include "tilestone/engine/read/shared_targets_internal.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/state/items.h"
#include "tilestone/state/state_dict.h"
#include "tilestone/state/value.h"

namespace tilestone::engine {

class Requested {
 public:
  Requested() = default;
  // `wanted`: the template; null for everything in the checkpoint. `common`: the checkpoint's
  // common state; nullopt in dialects without one. `subtrees`: what is read without being named.
  // Every tensor of a template that is read has memory afterwards. Throws Error for a template that
  // doesn't fit the checkpoint. Borrows `wanted`.
  Requested(const StateDict* wanted, const Opened& opened, const LoadOptions& options,
            std::optional<Value> common, const std::vector<Path>& subtrees);

  // All items, also those that are not read because they keep what the template has.
  Items& items() { return items_; }
  const Items& items() const { return items_; }
  // The tensors that are read. Those that share memory with another get temporary memory. Called
  // once.
  std::vector<TensorItem>& begin_reading();
  std::vector<TensorItem>& read() { return keeps() ? read_ : items_.tensors; }
  // The items whose object is read. Error(kNotFound) for one that is not in the checkpoint.
  std::vector<ObjectItem*> objects_to_read(const Opened& opened, const LoadOptions& options);
  // Throws the error of expect_all_stored(), if keys must not be missing. `read`: of the tensors.
  void expect_stored(const std::vector<TensorItem>& read, const Metadata& stored,
                     const LoadOptions& options) const;
  // Once the objects are read. Error(kMismatch) if one that takes the place of a dict or list of
  // the template is none.
  void expect_kinds() const;
  const AskedReplicas& replicas() const { return replicas_; }
  const KeptLeaves& kept() const { return findings_.kept; }

  // This rank's message to the coordinator, for judge_requests().
  Bytes message(const Metadata& stored, const LoadOptions& options) const;
  // After reading: the template's tree, or the checkpoint's, with the loaded items.
  // Error(kMismatch) if the values of tensors that share memory differ.
  StateDict take_loaded(const Opened& opened);

 private:
  bool is_read(const ObjectItem& item, const Metadata& stored) const;
  bool keeps() const { return !findings_.kept.keys.empty(); }
  bool is_kept(const std::string& key) const { return findings_.kept.keys.contains(key); }
  // Asks for replicas under the names that the checkpoint has. Returns the old names.
  std::set<std::string> rename_replicas(const Metadata& stored);
  void find_differences(const Opened& opened, const LoadOptions& options, const Value* common,
                        const std::set<std::string>& second_names);

  const StateDict* wanted_ = nullptr;
  bool plain_ = false;   // no factories and no non-persistent values
  StateDict built_;      // the template with its factories built
  StateDict requested_;  // `built_` without non-persistent values; empty if plain_
  Items items_;
  KindsByKey as_objects_;  // the template's dicts and lists that are stored as objects
  AskedReplicas replicas_;
  Findings findings_;
  std::vector<TensorItem> read_;  // if some tensors are kept
  SharedTargets shared_;
};

// The coordinator's part: checks the messages of all ranks, by rank, and returns the report of the
// load. Error(kMismatch) if the options don't allow what was found.
LoadReport judge_requests(const std::vector<Bytes>& of_ranks, const Metadata& stored,
                          const LoadOptions& options);

}  // namespace tilestone::engine
