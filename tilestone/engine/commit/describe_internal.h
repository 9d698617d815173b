// What describes a checkpoint, worked out of its ranks' reports: the same bytes whoever does it.
#pragma once

#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

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
};

struct Descriptions {
  Index index;
  Bytes manifest;
  std::set<std::string> files;  // that the index names
};

// Errors: merge_reports().
Descriptions describe_save(DescribedSave save, const Format& format, const Dialect& dialect);

}  // namespace tilestone::engine
