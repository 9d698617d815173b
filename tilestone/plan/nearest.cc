#include "tilestone/plan/nearest.h"

#include <span>

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
  const auto number = [&](size_t i) {
    if (i == 0) return kNoCopy;
    return static_cast<uint32_t>(&copies[i - 1] - metadata_.copies.data());
  };
  const auto file = [&](size_t i) { return metadata_.place(tensor, chunk, number(i)).file; };
  const auto nearness = [&](size_t i) {
    const FileWriter& writer = writers_[file(i)];
    if (same_world_ && writer.rank == rank_) return 2;
    return !host_.empty() && writer.host == host_ ? 1 : 0;
  };
  const size_t places = copies.size() + 1;
  const size_t first = static_cast<size_t>(rank_) % places;
  size_t best = first;
  for (size_t turn = 1; turn < places; ++turn) {
    const size_t i = (first + turn) % places;
    const int nearer = nearness(i) - nearness(best);
    if (nearer > 0 || (nearer == 0 && load_[file(i)] < load_[file(best)])) best = i;
  }
  load_[file(best)] += bytes;
  return number(best);
}

}  // namespace tilestone
