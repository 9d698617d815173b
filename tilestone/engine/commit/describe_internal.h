// Makes the files that describe a checkpoint from its ranks' receipts. The bytes are the same in
// whichever process it runs.
#pragma once

#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "tilestone/engine/open/tp_replicas_internal.h"
#include "tilestone/engine/run/inventory.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/format.h"
#include "tilestone/format/index.h"
#include "tilestone/plan/receipt.h"
#include "tilestone/state/value.h"

namespace tilestone::engine {

struct SaveToIndex {
  std::vector<Receipt> receipts;   // by rank
  std::span<const Bytes> encoded;  // encoded[i] is the result of receipts[i].encode()
  CopyPolicy copies = CopyPolicy::kNoted;
  std::string save_id = {};
  std::string writer = {};                             // "Tilestone 0.1.0"
  std::map<std::string, std::string> attributes = {};  // of the checkpoint
  Index of_dialect = {};                               // Dialect::encode_index() on rank 0
  bool dialect_follows = false;        // its files come after the format's switch, which decides
  std::set<std::string> remains = {};  // Manifest::remains
  ReplicaNames replicas = {};          // second names to add to the index
  bool inventory = false;              // fill NewIndex::inventory
  const Value* common = nullptr;  // the common state, for the inventory; null: the dialect has none
};

struct NewIndex {
  Index index;
  Bytes manifest;
  std::set<std::string> files;  // that the index names
  Inventory inventory = {};
};

// Throws the errors of merge_receipts() and add_replica_names().
NewIndex describe_save(SaveToIndex save, const Format& format, const Dialect& dialect);

// Keeps each object in the lowest rank's receipt only: in torch's rank-local mode, each rank writes
// the objects that all ranks have.
struct DroppedObjects {
  std::set<std::string> remains;  // the files that still contain bytes of dropped objects
  std::string differing;          // for people: which of them differ from what is kept; "": none
  int rank = -1;                  // one of whose objects differs
};
DroppedObjects drop_equal_objects(std::vector<Receipt>& receipts);

}  // namespace tilestone::engine
