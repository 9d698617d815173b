#include "tilestone/plan/nearest.h"

namespace tilestone {

Nearest::Nearest(const Metadata& metadata, const std::vector<FileWriter>& writers, int rank,
                 bool same_world, std::string_view host)
    : metadata_(metadata),
      writers_(writers),
      rank_(rank),
      same_world_(same_world),
      host_(host),
      load_(metadata.files.size(), 0) {}

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
  const auto nearness = [&](size_t i) {
    const FileWriter& writer = writers_[places[i]->file];
    if (same_world_ && writer.rank == rank_) return 2;
    return !host_.empty() && writer.host == host_ ? 1 : 0;
  };
  const auto load = [&](size_t i) { return load_[places[i]->file]; };
  const size_t first = static_cast<size_t>(rank_) % places.size();
  size_t best = first;
  for (size_t turn = 1; turn < places.size(); ++turn) {
    const size_t i = (first + turn) % places.size();
    const int nearer = nearness(i) - nearness(best);
    if (nearer > 0 || (nearer == 0 && load(i) < load(best))) best = i;
  }
  load_[places[best]->file] += bytes;
  return best;
}

}  // namespace tilestone
