#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "tilestone/base/host.h"
#include "tilestone/engine/read/places_internal.h"
#include "tilestone/format/data_file_name.h"

namespace tilestone::engine {

namespace {

bool has_copies(const Metadata& metadata) {
  return !metadata.copies.empty() ||
         std::any_of(metadata.objects.begin(), metadata.objects.end(),
                     [](const StoredObject& object) { return !object.copies.empty(); });
}

}  // namespace

Places::Places(const Opened& opened, int rank, int world)
    : opened_(opened), metadata_(opened.metadata), world_(world) {
  if (!has_copies(metadata_)) return;
  find_writers();
  nearest_.emplace(metadata_, writers_, rank, same_world_, host_name());
}

void Places::find_writers() {
  std::unordered_map<std::string_view, const Receipt*> receipts;
  if (opened_.manifest) {
    for (const Receipt& receipt : opened_.manifest->receipts) {
      for (const ReceiptFile& file : receipt.files) receipts.emplace(file.name, &receipt);
    }
  }
  int ranks = 0;  // at least so many ranks saved
  for (const std::string& file : metadata_.files) {
    FileWriter writer;
    const auto found = receipts.find(file);
    if (found != receipts.end()) {
      writer = {found->second->rank, found->second->host};
    } else if (const auto name = parse_data_file_name(file)) {
      writer.rank = name->rank;
    }
    ranks = std::max(ranks, writer.rank + 1);
    writers_.push_back(std::move(writer));
  }
  same_world_ = ranks <= world_ && (!opened_.manifest || opened_.manifest->world_size == world_);
  if (same_world_) weigh_files();
}

void Places::expect(std::span<const Transfer> transfers, std::span<const ObjectRead> objects) {
  if (!nearest_) return;
  std::vector<std::vector<uint32_t>> items;
  std::set<ChunkKey> seen;
  for (const Transfer& t : transfers) {
    if (!seen.emplace(t.tensor, t.chunk).second) continue;
    std::vector<uint32_t>& files = items.emplace_back();
    files.push_back(metadata_.place(t.tensor, t.chunk, kNoCopy).file);
    for (const StoredCopy& copy : metadata_.copies_of(t.tensor, t.chunk)) {
      files.push_back(copy.at.file);
    }
  }
  for (const ObjectRead& object : objects) {
    std::vector<uint32_t>& files = items.emplace_back();
    files.push_back(object.stored->at.file);
    for (const ItemLocation& copy : object.stored->copies) files.push_back(copy.file);
  }
  nearest_->expect(std::move(items));
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
                                              const AskedReplicas& asked, bool open_few) {
  std::vector<Transfer> own, others;
  if (metadata_.copies.empty()) return own;
  for (Transfer& transfer : transfers) {
    if (nearest_) transfer.copy = nearest_->own_copy(transfer.tensor, transfer.chunk);
    if (transfer.copy == kNoCopy) transfer.copy = own_replica(transfer, asked);
    if (transfer.copy == kNoCopy && open_few && same_world_) transfer.copy = choose_once(transfer);
    const bool alone = transfer.copy != kNoCopy || (open_few && most_ > mean_ + mean_ / 4);
    (alone ? own : others).push_back(std::move(transfer));
  }
  transfers = std::move(others);
  return own;
}

void Places::choose(std::vector<Transfer>& transfers) {
  if (!nearest_) return;
  for (const Transfer& transfer : transfers) {
    if (transfer.copy != kNoCopy) {
      chosen_.emplace(std::pair(transfer.tensor, transfer.chunk), transfer.copy);
    }
  }
  for (Transfer& transfer : transfers) transfer.copy = choose_once(transfer);
}

uint32_t Places::choose_once(const Transfer& transfer) {
  const auto [place, is_new] = chosen_.emplace(std::pair(transfer.tensor, transfer.chunk), kNoCopy);
  if (is_new) {
    const uint64_t bytes = stored_bytes(metadata_, {&transfer, 1});
    place->second = nearest_->choose(transfer.tensor, transfer.chunk, bytes);
  }
  return place->second;
}

size_t Places::choose(const StoredObject& object) {
  return nearest_ && !object.copies.empty() ? nearest_->choose(object) : 0;
}

// The bytes in the files of a rank: the mean, and of the rank with most.
void Places::weigh_files() {
  std::vector<uint64_t> bytes(static_cast<size_t>(world_), 0);  // by rank
  const auto add = [&](const ItemLocation& at) {
    const int rank = writers_[at.file].rank;
    if (rank != FileWriter::kUnknown) bytes[static_cast<size_t>(rank)] += at.length;
    mean_ += at.length;
  };
  for (const StoredTensor& tensor : metadata_.tensors) {
    for (const StoredChunk& chunk : tensor.chunks) add(chunk.at);
  }
  for (const StoredCopy& copy : metadata_.copies) add(copy.at);
  mean_ /= bytes.size();
  most_ = *std::max_element(bytes.begin(), bytes.end());
}

std::vector<int> Places::file_owners() const {
  constexpr uint64_t kSlack = 1u << 20;  // bytes; ranks without files of their own read stripes
  std::vector<int> owners;
  if (!same_world_ || metadata_.copies.empty() || most_ > mean_ + mean_ / 4 + kSlack) return owners;
  for (const FileWriter& writer : writers_) owners.push_back(writer.rank);
  return owners;
}

}  // namespace tilestone::engine
