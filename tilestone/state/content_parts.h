// Splits a value, by path, into the parts that its content hash is made of, to report where two
// values differ.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tilestone/state/value.h"

namespace tilestone {

struct ContentPart {
  std::string path;   // dotted
  uint64_t hash = 0;  // of a leaf, or of a container without its entries
  std::string text;   // a short text of the value, e.g. "0.5"
};

// A container comes before its contents. Entries of dicts, elements of lists and tuples, and
// attributes of described objects are separate parts. At a depth of 100, and after `most` parts, a
// value becomes one leaf. Two values with equal parts (in any order) have equal content hashes.
std::vector<ContentPart> content_parts(const Value& value, size_t most = 100'000);

// A path at which two values differ: only one of them has it, or their parts differ.
struct ContentDifference {
  std::string path;
  std::string a;  // text; "nothing" if it lacks the path
  std::string b;
};
// Returns the differences in the order of `a`, then those that only `b` has.
std::vector<ContentDifference> find_differences(const std::vector<ContentPart>& a,
                                                const std::vector<ContentPart>& b);

}  // namespace tilestone
