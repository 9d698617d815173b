#include <algorithm>
#include <map>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "tilestone/base/host.h"
#include "tilestone/engine/read/places_internal.h"

namespace tilestone::engine {

namespace {

bool has_copies(const Metadata& metadata) {
  return !metadata.copies.empty() ||
         std::any_of(metadata.objects.begin(), metadata.objects.end(),
                     [](const StoredObject& object) { return !object.copies.empty(); });
}

}  // namespace

Places::Places(const Opened& opened, int rank, int world)
    : opened_(opened), metadata_(opened.metadata) {
  if (!has_copies(metadata_) || !opened.manifest) return;
  same_world_ = opened.manifest->world_size == world;
  std::unordered_map<std::string_view, const RankReport*> reports;
  for (const RankReport& report : opened.manifest->reports) {
    for (const ReportedFile& file : report.files) reports.emplace(file.name, &report);
  }
  for (const std::string& file : metadata_.files) {
    const auto found = reports.find(file);
    writers_.push_back(found == reports.end()
                           ? FileWriter()
                           : FileWriter{found->second->rank, found->second->host});
  }
  nearest_.emplace(metadata_, writers_, rank, same_world_, host_name());
}

// The index of the chunk's copy that is the requested replica. kNoCopy: none, or the chunk's own
// item.
uint32_t Places::own_replica(const Transfer& transfer, const AskedReplicas& asked) const {
  const StoredTensor& tensor = metadata_.tensors[transfer.tensor];
  const auto rank = asked.find(tensor.key);
  if (rank == asked.end()) return kNoCopy;
  const auto places = opened_.replica_places.find({tensor.key, rank->second});
  if (places == opened_.replica_places.end()) return kNoCopy;
  const auto place = places->second.find(tensor.chunks[transfer.chunk].box);
  if (place == places->second.end()) return kNoCopy;
  for (const StoredCopy& copy : metadata_.copies_of(transfer.tensor, transfer.chunk)) {
    const ItemLocation& at = place->second;
    if (copy.at.file != at.file || copy.at.offset != at.offset) continue;
    return static_cast<uint32_t>(&copy - metadata_.copies.data());
  }
  return kNoCopy;
}

std::vector<Transfer> Places::take_own_copies(std::vector<Transfer>& transfers,
                                              const AskedReplicas& asked) const {
  std::vector<Transfer> own, others;
  if (metadata_.copies.empty()) return own;
  for (Transfer& transfer : transfers) {
    if (nearest_) transfer.copy = nearest_->own_copy(transfer.tensor, transfer.chunk);
    if (transfer.copy == kNoCopy) transfer.copy = own_replica(transfer, asked);
    (transfer.copy != kNoCopy ? own : others).push_back(std::move(transfer));
  }
  transfers = std::move(others);
  return own;
}

void Places::choose(std::vector<Transfer>& transfers) {
  if (!nearest_) return;
  // All of a chunk is read from one place. Parts read from two places could not be checked.
  std::map<std::pair<uint32_t, uint32_t>, uint32_t> chosen;
  for (const Transfer& transfer : transfers) {
    if (transfer.copy != kNoCopy) {
      chosen.emplace(std::pair(transfer.tensor, transfer.chunk), transfer.copy);
    }
  }
  for (Transfer& transfer : transfers) {
    const auto [place, is_new] =
        chosen.emplace(std::pair(transfer.tensor, transfer.chunk), kNoCopy);
    if (is_new) {
      const uint64_t bytes = stored_bytes(metadata_, {&transfer, 1});
      place->second = nearest_->choose(transfer.tensor, transfer.chunk, bytes);
    }
    transfer.copy = place->second;
  }
}

size_t Places::choose(const StoredObject& object) {
  return nearest_ && !object.copies.empty() ? nearest_->choose(object) : 0;
}

std::vector<int> Places::file_owners() const {
  std::vector<int> owners;
  if (!nearest_ || !same_world_ || metadata_.copies.empty()) return owners;
  for (const FileWriter& writer : writers_) owners.push_back(writer.rank);
  return owners;
}

}  // namespace tilestone::engine
