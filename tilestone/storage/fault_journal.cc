#include <algorithm>
#include <random>

#include "tilestone/storage/fault_journal_internal.h"
#include "tilestone/storage/names_internal.h"

namespace tilestone {
namespace {

bool keeps_names(Survival survival) {
  return survival != Survival::kNoUnsyncedEntries && survival != Survival::kNothingUnsynced;
}

constexpr size_t kSector = 512;

// Bytes [synced, end) of a file that was being written: a whole number of blocks of it stays, the
// rest is cut off or reads as zeros.
void tear(Bytes& bytes, size_t synced, size_t block, std::mt19937_64& random) {
  const size_t first = synced / block;
  const size_t blocks = (bytes.size() + block - 1) / block - first;
  const size_t kept = std::max(synced, (first + random() % (blocks + 1)) * block);
  if (kept >= bytes.size()) return;
  if (random() % 2 == 0) {
    bytes.resize(kept);
  } else {
    std::fill(bytes.begin() + static_cast<std::ptrdiff_t>(kept), bytes.end(), std::byte{0});
  }
}

// Each unsynced sector is there or reads as zeros, and the file ends anywhere from `synced` on.
void scatter(Bytes& bytes, size_t synced, std::mt19937_64& random) {
  if (random() % 2 == 0) bytes.resize(synced + random() % (bytes.size() - synced + 1));
  for (size_t at = synced; at < bytes.size();) {
    const size_t end = std::min(bytes.size(), (at / kSector + 1) * kSector);
    if (random() % 2 == 0) {
      std::fill(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                bytes.begin() + static_cast<std::ptrdiff_t>(end), std::byte{0});
    }
    at = end;
  }
}

Bytes surviving_bytes(const MemoryFile& file, uint64_t synced, Survival survival,
                      std::mt19937_64& random) {
  std::lock_guard lock(file.mutex);
  if (survival == Survival::kNoUnsyncedData || survival == Survival::kNothingUnsynced) {
    return Bytes(file.data.begin(), file.data.begin() + static_cast<std::ptrdiff_t>(synced));
  }
  Bytes bytes = file.data;
  if (synced == bytes.size()) return bytes;
  if (survival == Survival::kZeroedData) {
    std::fill(bytes.begin() + static_cast<std::ptrdiff_t>(synced), bytes.end(), std::byte{0});
  }
  if (survival == Survival::kTorn512) tear(bytes, synced, kSector, random);
  if (survival == Survival::kTorn4096) tear(bytes, synced, 4096, random);
  if (survival == Survival::kRandom) scatter(bytes, synced, random);
  return bytes;
}

}  // namespace

FaultJournal::FaultJournal(const MemoryStorage& storage)
    : made_directories_(storage.directories()), durable_{storage.entries(), storage.directories()} {
  for (const auto& [name, file] : durable_.files) synced_bytes_[file] = file->size();
}

void FaultJournal::created(const std::string& name, std::shared_ptr<MemoryFile> file) {
  pending_.push_back({"", name, std::move(file)});
}

void FaultJournal::renamed(const std::string& from, const std::string& to,
                           std::shared_ptr<MemoryFile> file) {
  if (from != to) pending_.push_back({from, to, std::move(file)});
}

void FaultJournal::removed(const std::string& name) { pending_.push_back({name, "", nullptr}); }

void FaultJournal::made_directory(const std::string& name) {
  if (name.empty() || made_directories_.contains(name)) return;
  made_directory(std::string(parent_name(name)));
  made_directories_.insert(name);
  pending_.push_back({"", name, nullptr});
}

void FaultJournal::synced(const std::shared_ptr<MemoryFile>& file) {
  synced_bytes_[file] = file->size();
}

bool FaultJournal::touches(const Change& change, std::string_view directory) {
  return (!change.gone.empty() && parent_name(change.gone) == directory) ||
         (!change.name.empty() && parent_name(change.name) == directory);
}

// The directory's changes become durable, and with a rename from or to another directory those
// earlier changes of that one that concern the same names: it can't be done otherwise.
void FaultJournal::synced_directory(const std::string& name) {
  std::set<std::string> needed;
  std::vector<bool> durable(pending_.size());
  for (size_t i = pending_.size(); i-- > 0;) {
    const Change& change = pending_[i];
    if (!touches(change, name) && !needed.contains(change.gone) && !needed.contains(change.name)) {
      continue;
    }
    durable[i] = true;
    if (!change.gone.empty()) needed.insert(change.gone);
    if (!change.name.empty()) needed.insert(change.name);
  }
  std::vector<Change> left;
  for (size_t i = 0; i < pending_.size(); ++i) {
    if (durable[i]) {
      durable_.apply(pending_[i]);
    } else {
      left.push_back(std::move(pending_[i]));
    }
  }
  pending_ = std::move(left);
}

void FaultJournal::Picture::apply(const Change& change) {
  if (!change.gone.empty()) files.erase(change.gone);
  if (change.name.empty()) return;
  if (change.file != nullptr) {
    files[change.name] = change.file;
  } else {
    directories.insert(change.name);
  }
}

bool FaultJournal::Picture::reachable(const std::string& name) const {
  for (auto part = parent_name(name); !part.empty(); part = parent_name(part)) {
    if (!directories.contains(std::string(part))) return false;
  }
  return true;
}

FileImage FaultJournal::surviving_image(Survival survival, uint64_t seed) const {
  std::mt19937_64 random(seed);
  Picture picture = durable_;
  for (const Change& change : pending_) {
    const bool kept = survival == Survival::kRandom ? random() % 2 == 0 : keeps_names(survival);
    if (kept) picture.apply(change);
  }
  FileImage image;
  for (const auto& [name, file] : picture.files) {
    if (!picture.reachable(name)) continue;
    const auto synced = synced_bytes_.find(file);
    const uint64_t bytes = synced == synced_bytes_.end() ? 0 : synced->second;
    image.emplace(name, surviving_bytes(*file, bytes, survival, random));
  }
  return image;
}

}  // namespace tilestone
