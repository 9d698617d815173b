// How the ranks of a save with a communicator compare what they hold (plan/contents.h). If
// something may differ, the coordinator asks each rank a question, in one more round.
#pragma once

#include <cstdint>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/engine/save/messages_internal.h"
#include "tilestone/plan/contents.h"
#include "tilestone/state/list_lengths.h"

namespace tilestone::engine {

// What the coordinator asks one rank: the answer kCompare to its planning message.
struct Question {
  // The common states differ. Rank 0 and this rank send theirs; -1: they do not differ.
  int other = -1;
  bool lists = false;            // send the lists
  std::vector<uint64_t> groups;  // send what it holds of these groups; ascending
  std::vector<uint32_t> chunks;  // and of these chunks

  Bytes encode() const;
  static Question decode(ByteView bytes);
};

struct Reply {
  Bytes parts = {};  // encode_parts() of the common state
  std::vector<ListLength> lists = {};
  std::vector<NamedContent> contents = {};

  Bytes encode() const;
  static Reply decode(ByteView bytes);
};

// The groups whose ranks have sent different contents, ascending.
std::vector<uint64_t> differing_groups(const std::vector<PlanMessage>& messages);
// Whether the lists that count may have different lengths.
bool lists_may_differ(const std::vector<PlanMessage>& messages);
// One question for each rank; empty: there is nothing to ask. `others`: the ranks whose common
// state differs from rank 0's.
std::vector<Question> questions_of(const std::vector<PlanMessage>& messages,
                                   const std::vector<int>& others,
                                   const std::vector<ContestedChunk>& contested);

}  // namespace tilestone::engine
