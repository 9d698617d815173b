// Terms: what must be equal on all ranks of a save or load, namely its location and some options.
// Each rank sends its terms at the end of its first message.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/engine/run/options.h"

namespace tilestone::engine {

// Names and values as the caller writes them. Every rank has the same names in the same order.
using Terms = std::vector<std::pair<std::string, std::string>>;

// The attributes themselves if they are short, else their number and hash.
std::string attributes_text(const std::map<std::string, std::string>& attributes);
// The option's value as Python callers write it, in quotes.
std::string differing_text(Checks::Differing differing);

Terms terms_of(const Location& location, const SaveOptions& options);
Terms terms_of(const Location& location, const LoadOptions& options);

// The message with the terms appended.
Bytes with_terms(Bytes message, const Terms& terms);
// Removes the terms from every rank's message and compares them. Error(kMismatch) names the first
// term that differs, its values and the ranks that have them.
void agree_on_terms(std::vector<Bytes>& messages);

}  // namespace tilestone::engine
