// The two halves of Megatron-Core's dialect: taking a tree apart, and putting it together again.
#pragma once

#include <string_view>
#include <utility>

#include "tilestone/format/format.h"
#include "tilestone/state/items.h"
#include "tilestone/state/state_dict.h"
#include "tilestone/state/value.h"

namespace tilestone::dialect {

inline constexpr std::string_view kCommonKey = "common_state";  // reserved
inline constexpr std::string_view kCommonObject = "common_state/shard_0_1";

// What the object with the common state holds. Megatron-Core stores objects in lists.
inline Value as_object(Value common) { return Value::list({std::move(common)}); }

// Whether the format stores each object in a list of one, and the common state as an object.
bool lists_objects(const Format& format);

// The items of a tree. Items::common is a dict.
Items split(const StateDict& state, const Format& format);
// The items of a tree that contains only wrapped entities; the object with the common state may be
// one of them. Items::common is not set. Error(kInvalidArgument), naming the path, for anything
// else in the tree.
Items split_shards(const StateDict& state, const Format& format);

// See Dialect::wanted_items() and from_items().
Items wanted_of(const StateDict& wanted, const Value& common);
StateDict merged(const StateDict& wanted, const Items& loaded);

}  // namespace tilestone::dialect
