// What describes a checkpoint, worked out of its ranks' reports: the same bytes whoever does it.
#pragma once

#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "tilestone/engine/open/tp_replicas_internal.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/format.h"
#include "tilestone/format/index.h"
#include "tilestone/plan/report.h"

namespace tilestone::engine {

struct DescribedSave {
  std::vector<RankReport> reports;  // by rank
  std::span<const Bytes> encoded;   // encoded[i] is what reports[i].encode() gives
  CopyPolicy copies = CopyPolicy::kRefuse;
  std::string save_id;
  std::string writer;                                  // "Tilestone 0.1.0"
  std::map<std::string, std::string> attributes = {};  // of the checkpoint
  Index of_dialect = {};                               // the dialect's files of the index
  std::set<std::string> remains = {};                  // Manifest::remains
  ReplicaNames replicas = {};                          // to be named in the index too
};

struct Descriptions {
  Index index;
  Bytes manifest;
  std::set<std::string> files;  // that the index names
};

// Errors: merge_reports().
Descriptions describe_save(DescribedSave save, const Format& format, const Dialect& dialect);

// What describes the part of a checkpoint that one rank has written alone, as torch's rank-local
// mode has it; nothing is asked about coverage. Error(kUnsupported) in a format that has no such
// file.
IndexFile describe_rank(RankReport report, const Format& format);

// Of an object that several reports have, all but the lowest rank's go: the ranks of torch's
// rank-local mode each write the objects that all have. `differs` is called for each whose bytes
// are not the lowest rank's, with its key and the two ranks. Returns the files in which their bytes
// stay.
std::set<std::string> drop_equal_objects(
    std::vector<RankReport>& reports,
    const std::function<void(const std::string& key, int lowest, int rank)>& differs);

}  // namespace tilestone::engine
