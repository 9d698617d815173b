#include <algorithm>
#include <iterator>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/format/torch_dist/metadata_reader_internal.h"

namespace tilestone::torch_dist {
namespace {

class RankLocalMerger {
 public:
  void add(Metadata rank) {
    expect_same_save(rank);
    std::vector<uint32_t> files;
    for (const std::string& name : rank.files) files.push_back(file_index(name));
    for (StoredTensor& tensor : rank.tensors) {
      for (StoredChunk& chunk : tensor.chunks) chunk.at.file = files[chunk.at.file];
      add_tensor(std::move(tensor));
    }
    for (StoredObject& object : rank.objects) {
      object.at.file = files[object.at.file];
      if (objects_.emplace(object.key, all_.objects.size()).second) {
        all_.objects.push_back(std::move(object));
      }
    }
    if (all_.save_id.empty()) all_.save_id = rank.save_id;
    if (all_.writer.empty()) all_.writer = rank.writer;
  }

  Metadata finish() && {
    all_.rank_local = true;
    return std::move(all_);
  }

 private:
  // Stock torch gives each rank a save id of its own. Tilestone gives all ranks the same save id
  // and begins the data files' names with it.
  void expect_same_save(const Metadata& rank) {
    const bool ours =
        std::any_of(rank.files.begin(), rank.files.end(),
                    [&](const std::string& name) { return name.starts_with(rank.save_id + "__"); });
    if (ours && !rank.save_id.empty() && own_id_.empty()) own_id_ = rank.save_id;
    ids_.insert(rank.save_id);
    if (own_id_.empty() || ids_.size() == 1) return;
    throw Error(ErrorCode::kCorrupt, "the ranks' metadata files come from different saves: " +
                                         *ids_.begin() + " and " + *ids_.rbegin());
  }

  uint32_t file_index(const std::string& name) {
    const auto [known, fresh] = files_.emplace(name, static_cast<uint32_t>(all_.files.size()));
    if (fresh) all_.files.push_back(name);
    return known->second;
  }

  void add_tensor(StoredTensor tensor) {
    const auto [known, fresh] = tensors_.emplace(tensor.key, all_.tensors.size());
    if (fresh) {
      all_.tensors.push_back(std::move(tensor));
      return;
    }
    StoredTensor& merged = all_.tensors[known->second];
    if (merged.dtype != tensor.dtype || !(merged.shape == tensor.shape)) {
      throw Error(ErrorCode::kCorrupt,
                  "the ranks' metadata files disagree: " + std::string(to_string(merged.dtype)) +
                      to_string(merged.shape) + " and " + std::string(to_string(tensor.dtype)) +
                      to_string(tensor.shape))
          .with_key(tensor.key);
    }
    std::move(tensor.chunks.begin(), tensor.chunks.end(), std::back_inserter(merged.chunks));
  }

  Metadata all_;
  std::set<std::string> ids_;  // the ranks' save ids
  std::string own_id_;         // the save id of a rank that Tilestone wrote; "": none so far
  std::unordered_map<std::string, uint32_t> files_;
  std::unordered_map<std::string, size_t> tensors_;
  std::unordered_map<std::string, size_t> objects_;
};

}  // namespace

Metadata merge_rank_local(std::vector<Metadata> ranks) {
  RankLocalMerger merger;
  for (Metadata& rank : ranks) merger.add(std::move(rank));
  return std::move(merger).finish();
}

}  // namespace tilestone::torch_dist
