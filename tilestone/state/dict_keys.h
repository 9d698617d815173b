// The keys of dicts that are not text. A checkpoint's paths have every key of a dict as text, as
// torch writes them; a manifest has what the keys were.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "tilestone/state/state_dict.h"

namespace tilestone {

// The keys of one dict. A dict without such keys may be recorded too: then its keys are known to be
// text although they read as ints.
struct DictKeys {
  bool ints = false;                    // every key that reads as an int is one
  std::map<std::string, Value> others;  // further keys, by their text
};
// By the path of the dict, in which keys are text and list indices are ints.
using TreeKeys = std::map<Path, DictKeys>;

// The int that the text is the decimal form of: "7" and "-3", not "07" or "+7".
std::optional<int64_t> int_of_key(std::string_view text);
// What a load without a template must know of the keys of a dict; nullopt if they are all text that
// does not read as an int.
std::optional<DictKeys> keys_of(const StateDict& dict);
// Makes the keys of a loaded dict, which are text, what they were.
void restore_keys(StateDict& dict, const DictKeys& keys);
// Adds the keys that another rank recorded; those that are known stay.
void add_keys(TreeKeys& known, const TreeKeys& more);

}  // namespace tilestone
