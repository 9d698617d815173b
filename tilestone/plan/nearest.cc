#include "tilestone/plan/nearest.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace tilestone {

Nearest::Nearest(const Metadata& metadata, const std::vector<FileWriter>& writers, int rank,
                 bool same_world, std::string_view host)
    : metadata_(metadata),
      writers_(writers),
      rank_(rank),
      same_world_(same_world),
      host_(host),
      load_(metadata.files.size(), 0),
      opened_(metadata.files.size(), false) {}

int Nearest::nearness(uint32_t file) const {
  const FileWriter& writer = writers_[file];
  if (same_world_ && writer.rank == rank_) return 2;
  return !host_.empty() && writer.host == host_ ? 1 : 0;
}

// Removes files that are farther than another one.
void Nearest::keep_nearest(std::vector<uint32_t>& files) const {
  int nearest = 0;
  for (const uint32_t file : files) nearest = std::max(nearest, nearness(file));
  std::erase_if(files, [&](uint32_t file) { return nearness(file) < nearest; });
}

void Nearest::expect(std::vector<std::vector<uint32_t>> items) {
  if (!same_world_) return;
  for (std::vector<uint32_t>& files : items) {
    keep_nearest(files);
    if (files.size() == 1) opened_[files.front()] = true;
  }
  const auto is_opened = [&](const std::vector<uint32_t>& files) {
    return std::any_of(files.begin(), files.end(), [&](uint32_t file) { return opened_[file]; });
  };
  for (std::erase_if(items, is_opened); !items.empty(); std::erase_if(items, is_opened)) {
    std::map<uint32_t, size_t> counts;  // by file: how many of the remaining items it has
    for (const std::vector<uint32_t>& files : items) {
      for (const uint32_t file : files) ++counts[file];
    }
    const auto most = std::max_element(
        counts.begin(), counts.end(),
        [](const auto& a, const auto& b) { return a.second < b.second; });  // the first of several
    opened_[most->first] = true;
  }
}

bool Nearest::is_own(const ItemLocation& at) const {
  return same_world_ && writers_[at.file].rank == rank_;
}

uint32_t Nearest::own_copy(uint32_t tensor, uint32_t chunk) const {
  if (!same_world_ || is_own(metadata_.place(tensor, chunk, kNoCopy))) return kNoCopy;
  for (const StoredCopy& copy : metadata_.copies_of(tensor, chunk)) {
    if (is_own(copy.at)) return static_cast<uint32_t>(&copy - metadata_.copies.data());
  }
  return kNoCopy;
}

uint32_t Nearest::choose(uint32_t tensor, uint32_t chunk, uint64_t bytes) {
  const std::span<const StoredCopy> copies = metadata_.copies_of(tensor, chunk);
  std::vector<const ItemLocation*> places = {&metadata_.place(tensor, chunk, kNoCopy)};
  for (const StoredCopy& copy : copies) places.push_back(&copy.at);
  const size_t best = choose(places, bytes);
  if (best == 0) return kNoCopy;
  return static_cast<uint32_t>(&copies[best - 1] - metadata_.copies.data());
}

size_t Nearest::choose(const StoredObject& object) {
  std::vector<const ItemLocation*> places = {&object.at};
  for (const ItemLocation& copy : object.copies) places.push_back(&copy);
  return choose(places, object.at.length);
}

size_t Nearest::choose(std::span<const ItemLocation* const> places, uint64_t bytes) {
  const auto merit = [&](size_t i) {  // ascending
    const uint32_t file = places[i]->file;
    return std::tuple(nearness(file), opened_[file] ? 1 : 0, ~load_[file]);
  };
  const size_t first = static_cast<size_t>(rank_) % places.size();
  size_t best = first;
  for (size_t turn = 1; turn < places.size(); ++turn) {
    const size_t i = (first + turn) % places.size();
    if (merit(best) < merit(i)) best = i;
  }
  load_[places[best]->file] += bytes;
  return best;
}

}  // namespace tilestone
