// Differences between the keys that a load wants and those in the checkpoint, and what to do about
// them: LoadOptions::not_in_checkpoint, not_requested and other_shape. Each rank sends its findings
// to the coordinator with its last message. The coordinator merges and checks them, and sends the
// report to every rank.
#pragma once

#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/state/items.h"
#include "tilestone/state/metadata.h"
#include "tilestone/state/state_dict.h"

namespace tilestone::engine {

// One rank's findings.
struct Findings {
  std::vector<std::string> not_in_checkpoint;
  std::vector<std::string> other_shape;
  KeptLeaves kept;  // the leaves of both lists, which are not read
};

// Whether the options allow a leaf to keep what the template has.
bool keeps_some(const LoadOptions& options);
// Finds the differences that the options allow. Planning rejects the others, naming the key.
Findings find_kept(const Items& wanted, const Metadata& stored, const LoadOptions& options);

// Error(kNotFound) if a factory of `wanted` has built a leaf that is kept, but has no data that the
// leaf could keep. `built`: the same tree after build_factories().
void expect_kept_data(const StateDict& wanted, const StateDict& built, const KeptLeaves& kept);

// A rank's message. Empty if nobody sees findings. `is_template`: `wanted` may lack keys of the
// checkpoint.
Bytes encode_findings(const Findings& findings, const Items& wanted, bool is_template,
                      const Metadata& stored, const LoadOptions& options);

// The coordinator's part: merges the ranks' findings into the report, and logs it if the options
// say so. Error(kMismatch) if not_requested is kError and no rank requests some key of the
// checkpoint.
LoadReport unite_findings(const std::vector<Bytes>& of_ranks, const Metadata& stored,
                          const LoadOptions& options);

// The report as a message; empty bytes are an empty report.
Bytes encode_report(const LoadReport& report);
LoadReport decode_report(ByteView bytes);

}  // namespace tilestone::engine
