// tilestone ls: prints one line per key.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tilestone/cli/commands.h"
#include "tilestone/cli/natural.h"
#include "tilestone/cli/opened.h"
#include "tilestone/cli/output.h"
#include "tilestone/cli/run.h"
#include "tilestone/cli/tree.h"

namespace tilestone::cli {
namespace {

struct ListedRow {
  const StoredTensor* tensor = nullptr;  // null: an object
  std::string key;
  uint64_t bytes = 0;  // of the whole tensor, or of the object's item
  size_t shards = 1;
};

std::vector<ListedRow> select(const Metadata& metadata, const LsOptions& options) {
  std::vector<ListedRow> rows;
  if (!options.objects_only) {
    for (const StoredTensor& tensor : metadata.tensors) {
      if (!matches(options.patterns, tensor.key)) continue;
      const uint64_t bytes = static_cast<uint64_t>(numel(tensor.shape)) * itemsize(tensor.dtype);
      rows.push_back({&tensor, tensor.key, bytes, tensor.chunks.size()});
    }
  }
  if (!options.tensors_only) {
    for (const StoredObject& object : metadata.objects) {
      if (!matches(options.patterns, object.key)) continue;
      rows.push_back({nullptr, object.key, object.at.length, 1});
    }
  }
  std::stable_sort(rows.begin(), rows.end(), [&](const ListedRow& a, const ListedRow& b) {
    return options.by_size && a.bytes != b.bytes ? a.bytes > b.bytes : natural_less(a.key, b.key);
  });
  return rows;
}

struct Totals {
  uint64_t tensors = 0, tensor_bytes = 0, shards = 0, objects = 0, object_bytes = 0;
};

Totals total(const std::vector<ListedRow>& rows) {
  Totals sum;
  for (const ListedRow& row : rows) {
    if (row.tensor != nullptr) {
      ++sum.tensors;
      sum.tensor_bytes += row.bytes;
      sum.shards += row.shards;
    } else {
      ++sum.objects;
      sum.object_bytes += row.bytes;
    }
  }
  return sum;
}

void print_json(const std::vector<ListedRow>& rows, const Totals& sum, const Metadata& metadata) {
  nlohmann::ordered_json out;
  out["tensors"] = nlohmann::ordered_json::array();
  out["objects"] = nlohmann::ordered_json::array();
  for (const ListedRow& row : rows) {
    if (row.tensor != nullptr) {
      out["tensors"].push_back({{"key", row.key},
                                {"dtype", to_string(row.tensor->dtype)},
                                {"shape", row.tensor->shape.span()},
                                {"shards", row.shards},
                                {"bytes", row.bytes}});
    } else {
      out["objects"].push_back({{"key", row.key}, {"bytes", row.bytes}});
    }
  }
  out["total"] = {{"tensors", sum.tensors},
                  {"tensor_bytes", sum.tensor_bytes},
                  {"shards", sum.shards},
                  {"objects", sum.objects},
                  {"object_bytes", sum.object_bytes},
                  {"copies", copies_in(metadata)},
                  {"copy_bytes", copy_bytes(metadata)}};
  fmt::print("{}\n", out.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
}

}  // namespace

int ls(const LsOptions& options) {
  const Checkpoint checkpoint = Checkpoint::open(location_of(options.path, options.follow_links));
  const std::vector<ListedRow> rows = select(checkpoint.metadata(), options);
  if (rows.empty() && !options.patterns.empty()) refuse_pattern(checkpoint, options.patterns);
  if (options.tree) return print_tree(checkpoint.metadata(), options);
  const Totals sum = total(rows);
  if (options.json) {
    print_json(rows, sum, checkpoint.metadata());
    return kOk;
  }
  Table table({"KEY", "DTYPE", "SHAPE", "SHARDS", "BYTES"}, "lllrr");
  for (const ListedRow& row : rows) {
    const bool tensor = row.tensor != nullptr;
    table.add({printable(row.key), tensor ? std::string(to_string(row.tensor->dtype)) : "object",
               tensor ? shape_text(row.tensor->shape) : "",
               tensor ? std::to_string(row.shards) : "", human_bytes(row.bytes)});
  }
  table.print(options.wide);
  fmt::print("{} in {}, {}; {}, {}\n", counted(sum.tensors, "tensor"), counted(sum.shards, "shard"),
             human_bytes(sum.tensor_bytes), counted(sum.objects, "object"),
             human_bytes(sum.object_bytes));
  if (const uint64_t copies = copies_in(checkpoint.metadata()); copies > 0) {
    fmt::print("copies of shards and objects, in other files: {}, {}\n", grouped(copies),
               human_bytes(copy_bytes(checkpoint.metadata())));
  }
  return kOk;
}

}  // namespace tilestone::cli
