// Terms: what all ranks of a save or load must say alike, its location and some options. They
// travel at the end of a rank's first message.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/engine/run/location.h"
#include "tilestone/engine/run/options.h"

namespace tilestone::engine {

// Names and values as the caller writes them; the same names in the same order on every rank.
using Terms = std::vector<std::pair<std::string, std::string>>;

// "rank 3", "ranks 1, 2 and 3", "ranks 0, 1, 2, 3 and 60 more". `most`: how many are named.
std::string ranks_text(const std::vector<int>& ranks, size_t most = 4);

// Whole where it is short, else by its hash.
std::string attributes_text(const std::map<std::string, std::string>& attributes);
// As Python's callers write it, in quotes.
std::string differing_text(SaveOptions::Differing differing);

Terms terms_of(const Location& location, const SaveOptions& options);
Terms terms_of(const Location& location, const LoadOptions& options);

Bytes with_terms(Bytes message, const Terms& terms);
// Takes the terms off every rank's message. Error(kMismatch) with the first term that differs, its
// values and who has them.
void agree_on_terms(std::vector<Bytes>& messages);

}  // namespace tilestone::engine
