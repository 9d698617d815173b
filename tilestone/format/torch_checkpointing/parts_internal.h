// The parts of a folder: its index, the file of one rank, and what the files of all ranks hold
// together. All functions throw Error(kCorrupt, kUnsafe, kUnsupported), and kInvalidArgument for
// what is invalid in a file.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/dtype.h"
#include "tilestone/format/format.h"
#include "tilestone/format/index.h"
#include "tilestone/geometry/placement.h"
#include "tilestone/state/metadata.h"
#include "tilestone/state/value.h"

namespace tilestone::torch_checkpointing {

// How a tensor is distributed over the ranks that have saved the folder.
struct Distribution {
  Dims shape;  // of the whole tensor
  Sharding sharding;
  std::optional<Dims> coordinate = std::nullopt;  // in the mesh, of the rank whose file says so
  std::vector<int> ranks = {};                    // for which this holds; only in the index
};
// The part that the rank holds as a tensor of the shape `local`.
LocalBoxes held_by(const Distribution& distribution, int rank, const Dims& local);

// metadata.pkl.
struct FolderIndex {
  struct Item {
    std::map<int, std::string> files;  // by rank
    std::string serialization;         // of its files: kTorchSerialization
    std::set<int> ranks;               // that have saved tensors of it
  };
  std::map<std::string, Item> items;
  std::map<std::string, std::vector<Distribution>> tensors;  // by key
};
inline constexpr std::string_view kTorchSerialization = "TorchSerialization";  // torch.save
FolderIndex parse_folder_index(ByteView pickle);

// What a rank's file holds. Its tensors stand for archive::FileTensor, whose `more` is the
// Distribution of a DTensor, or null; they have the shape of the whole tensor.
Value read_rank_file(const FileParts& read);

// The names of files of torch.save.
std::vector<std::string> rank_files(std::span<const std::string> names);
// Whether all are named as files of ranks ("model_0.pt"), one of rank 0 among them.
bool are_all_rank_files(std::span<const std::string> names);
// Also throws Error(kCoverage), naming key and file, if files are missing.
Metadata read_folder(const DirectoryFiles& files, const Format& format);

}  // namespace tilestone::torch_checkpointing
