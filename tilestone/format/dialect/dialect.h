// Dialect: which items a state dict consists of, and the tree that loaded items make. Independent
// of the bytes: each dialect can be stored in each format.
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

// A damaged file of the index.
struct IndexFault {
  std::string file;
  uint64_t offset = 0;  // bytes
  std::string problem;
  bool unsafe = false;  // refused as kUnsafe
};

class Dialect {
 public:
  virtual ~Dialect() = default;
  virtual std::string_view name() const = 0;  // "pytorch", "megatron"

  // ---- Saving

  // The dialect in which what it saves is read.
  virtual std::string_view read_as() const { return name(); }
  // Another program writes the dialect's files of the index, before and after the save, which
  // therefore goes into the location as it stands and leaves them alone.
  virtual bool shares_directory() const { return false; }

  // A tree (factories built, non-persistent values dropped) as items of `format`. Errors:
  // kInvalidArgument naming the key (two leaves with one key, an object that could not be read
  // back).
  virtual Items to_items(const StateDict& state, const Format& format) const = 0;
  // The dialect's files of the index: of the coordinator's items, so of its common state.
  virtual Index encode_index(const Items& items, const Format& format) const = 0;
  // Files of encode_index() have names that another save may have used: a save needs a directory of
  // its own.
  virtual bool has_fixed_names() const { return false; }

  // ---- Opening

  // Those of a directory's files that belong to the index and are the dialect's.
  virtual std::vector<std::string> index_files(std::span<const std::string> names) const = 0;
  // The common state, where it is a file of the index. `files.contents` holds index_files().
  virtual std::optional<Value> parse_common(const DirectoryFiles& files) const = 0;
  // The key of the object that holds the common state too, or alone; "": there is none. The object
  // is no part of Metadata::objects once a checkpoint is open.
  virtual std::string_view common_object() const { return ""; }
  // What verify finds wrong with the dialect's files of the index, which lie in `files`.
  virtual std::vector<IndexFault> verify_index(const DirectoryFiles&) const { return {}; }

  // ---- Loading

  // The object that an item of `format` holds, of the value that Format::parse_object() made of it.
  // Error(kCorrupt) when it is no item of the dialect's.
  virtual Value object_of(Value stored, const Format&) const { return stored; }
  // The items that a template (as in to_items) asks for, whether or not the checkpoint has them;
  // they have the template's memory and values. `common`: the checkpoint's common state, null in
  // dialects that have none.
  virtual Items wanted_items(const StateDict& wanted, const Value* common) const = 0;
  // The tree of the template's structure that loaded items make; `loaded` are wanted_items() in
  // their order, and Items::common what the checkpoint has of it.
  virtual StateDict from_items(const StateDict& wanted, const Items& loaded) const = 0;
};

// PyTorch's: a wrapped entity has its own key, anything else its dotted path.
std::shared_ptr<const Dialect> pytorch_dialect();

// Megatron-Core's: only wrapped entities are sharded, each under its own key; the rest is one
// common state. Lists are taken apart, and merged again, as Megatron-Core's dict_utils does. A
// load's common state is the checkpoint's, whatever values the template has in its place; beyond
// Megatron-Core, an unwrapped leaf that the common state lacks is the stored item whose key is its
// path.
std::shared_ptr<const Dialect> megatron_dialect();

// Megatron-Core's sharded part alone, for a save that Megatron-Core itself has begun and ends: it
// has written common.pt to the location, and writes metadata.json once the save has returned, so
// the checkpoint is not complete before. For saves only, over torch_dist: a state of nothing but
// wrapped entities, of which one may be the common state as Megatron-Core from 0.19 on hands it
// over (ShardedObject "common_state"). What stands at the location is replaced in place.
std::shared_ptr<const Dialect> megatron_shards_dialect();

}  // namespace tilestone
