// A value taken apart into what its content hash is made of, by path: to say where two differ.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tilestone/state/value.h"

namespace tilestone {

struct ContentPart {
  std::string path;   // dotted
  uint64_t hash = 0;  // of a leaf, or of what a container is without its entries
  std::string text;   // a short one of a leaf, e.g. "0.5"
};

// Containers before what they hold. Entries of dicts, elements of lists and tuples, and attributes
// of described objects have parts of their own; in any further depth, and from `most` parts on, a
// value is one leaf. Two values with equal parts (in any order) are the same to content_hash().
std::vector<ContentPart> content_parts(const Value& value, size_t most = 100'000);

// Where two values differ, by their parts: the paths that one of them lacks, or has otherwise, in
// the order of `a` and then of `b`.
struct ContentDifference {
  std::string path;
  std::string a;  // text; "nothing" where it lacks the path
  std::string b;
};
std::vector<ContentDifference> find_differences(const std::vector<ContentPart>& a,
                                                const std::vector<ContentPart>& b);

}  // namespace tilestone
