// A Dialect turns a state dict into items, and loaded items into a tree. It does not depend on the
// stored bytes: each dialect can be stored in each format.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/format/format.h"
#include "tilestone/state/items.h"
#include "tilestone/state/metadata.h"
#include "tilestone/state/state_dict.h"

namespace tilestone {

// Damage in an index file.
struct IndexFault {
  std::string file;
  uint64_t offset = 0;  // bytes
  std::string problem;
  bool unsafe = false;  // the content looks like an attack (kUnsafe)
};

class Dialect {
 public:
  virtual ~Dialect() = default;
  virtual std::string_view name() const = 0;  // "pytorch", "megatron"

  // True if a tensor KEY may have second names for the replicas of tensor-parallel ranks
  // (KEY.__tp_replica_RANK): an index may list them, and a template may ask for them.
  virtual bool has_replica_names() const { return false; }

  // ---- Saving

  // The name of the dialect with which to read what this dialect saves.
  virtual std::string_view read_as() const { return name(); }
  // True if another program writes the dialect's index files, before and after the save. The save
  // then writes into the existing directory and does not touch those files.
  virtual bool shares_directory() const { return false; }

  // Turns a tree into items of `format`. The tree's factories must have been built and its
  // non-persistent values removed. Error(kInvalidArgument), naming the key, if two leaves have one
  // key or an object could not be read back.
  virtual Items to_items(const StateDict& state, const Format& format) const = 0;
  // The dialect's index files. `items`: the coordinator's items, with its common state.
  virtual Index encode_index(const Items& items, const Format& format) const = 0;
  // True if other saves use the same names for the files of encode_index(). Each save then needs a
  // directory of its own.
  virtual bool has_fixed_names() const { return false; }

  // ---- Opening

  // The index file that only checkpoints of this dialect have, and that is written last; "": there
  // is none.
  virtual std::string_view mark() const { return ""; }
  // The dialect's index files among the names of all files in a directory.
  virtual std::vector<std::string> index_files(std::span<const std::string> names) const = 0;
  // The common state, if it is stored in an index file; else nullopt. `files.contents` has the
  // bytes of index_files().
  virtual std::optional<Value> parse_common(const DirectoryFiles& files) const = 0;
  // The key of the object that holds the common state, in addition to the index file or instead of
  // it; "": there is no such object. When a checkpoint is opened, this object is removed from
  // Metadata::objects.
  virtual std::string_view common_object() const { return ""; }
  // What that object holds, of the common state that parse_common() returns.
  virtual Value common_as_object(Value common) const { return common; }
  // True if only the items' index lists the keys, so that keys can be removed from it alone.
  virtual bool can_lose_keys() const { return false; }
  // Checks the dialect's index files, for verify. `files.contents` has their bytes.
  virtual std::vector<IndexFault> verify_index(const DirectoryFiles&) const { return {}; }

  // ---- Loading

  // The object in an item of `format`. `stored` is the value that Format::parse_object() returned.
  // Error(kCorrupt) if the dialect does not store objects in this way.
  virtual Value object_of(Value stored, const Format&) const { return stored; }
  // The items that a template asks for, whether or not the checkpoint has them. They have the
  // template's memory and values. The template is a tree as in to_items(). `common`: the
  // checkpoint's common state; null in dialects without one.
  virtual Items wanted_items(const StateDict& wanted, const Value* common) const = 0;
  // Makes a tree of the loaded items, with the template's structure. `loaded` has the items of
  // wanted_items() in the same order, and the checkpoint's common state in Items::common.
  virtual StateDict from_items(StateDict wanted, const Items& loaded) const = 0;
};

// PyTorch's dialect. The key of a wrapped entity is its own; the key of any other leaf is its
// dotted path.
std::shared_ptr<const Dialect> pytorch_dialect();

// Megatron-Core's dialect. Only wrapped entities are sharded, each under its own key. Everything
// else is one common state. Lists are taken apart and merged again as by Megatron-Core's
// dict_utils. A load takes the common state from the checkpoint and ignores the template's values
// in its place. Beyond Megatron-Core: an unwrapped leaf that is not in the common state is loaded
// from the stored item whose key is the leaf's path.
std::shared_ptr<const Dialect> megatron_dialect();

// Only the sharded part of Megatron-Core's dialect, for a save that Megatron-Core itself starts and
// finishes. Megatron-Core writes common.pt to the location before the save, and metadata.json after
// the save has returned; only then is the checkpoint complete. For saves in torch_dist only. The
// state may contain only wrapped entities. One of them may be the common state as Megatron-Core
// passes it since 0.19 (ShardedObject "common_state"). A checkpoint at the location is replaced in
// place.
std::shared_ptr<const Dialect> megatron_shards_dialect();

}  // namespace tilestone
