// What a load finds of keys, and what its options say of that: LoadOptions::not_in_checkpoint,
// not_requested and other_shape. A rank's findings travel with its last message to the coordinator,
// which unites and judges them; the report goes back to every rank.
#pragma once

#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/engine/run/kept_leaves.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/state/items.h"
#include "tilestone/state/metadata.h"
#include "tilestone/state/state_dict.h"

namespace tilestone::engine {

// One rank's.
struct Findings {
  std::vector<std::string> not_in_checkpoint;
  std::vector<std::string> other_shape;
  KeptLeaves kept;  // of both: what is not read
};

// Whether a leaf may keep what the template has.
bool keeps_some(const LoadOptions& options);
// Of what the options don't leave to the planning, which refuses it with the key.
Findings find_kept(const Items& wanted, const Metadata& stored, const LoadOptions& options);

// Error(kNotFound) where a factory of `wanted` has built a leaf that is kept, and has no data that
// the leaf could keep. `built`: the same tree after build_factories().
void expect_kept_data(const StateDict& wanted, const StateDict& built, const KeptLeaves& kept);

// A rank's message. Empty where the options ask for nothing.
Bytes encode_findings(const Findings& findings, const Items& wanted, const Metadata& stored,
                      const LoadOptions& options);

// The coordinator's part. Error(kMismatch) where not_requested is an error and a key of the
// checkpoint is requested by no rank. What is to be reported is logged too.
LoadReport unite_findings(const std::vector<Bytes>& of_ranks, const Metadata& stored,
                          const LoadOptions& options);

// The report on its way back; empty bytes are an empty report.
Bytes encode_report(const LoadReport& report);
LoadReport decode_report(ByteView bytes);

}  // namespace tilestone::engine
