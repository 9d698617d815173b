// The two halves of Megatron-Core's dialect: a tree taken apart, and put together again.
#pragma once

#include <string_view>

#include "tilestone/format/format.h"
#include "tilestone/state/items.h"
#include "tilestone/state/state_dict.h"

namespace tilestone::dialect {

inline constexpr std::string_view kCommonKey = "common_state";  // reserved
inline constexpr std::string_view kCommonObject = "common_state/shard_0_1";

// Whether the format's objects are lists that hold the object, and the common state is one of them.
bool lists_objects(const Format& format);

// Items::common is a dict.
Items split(const StateDict& state, const Format& format);
// The same for a tree of nothing but wrapped entities, the common state's object among them or not:
// without Items::common. Error(kInvalidArgument) naming the place of anything else.
Items split_shards(const StateDict& state, const Format& format);

// As Dialect::wanted_items() and from_items().
Items wanted_of(const StateDict& wanted, const Value& common);
StateDict merged(const StateDict& wanted, const Items& loaded);

}  // namespace tilestone::dialect
