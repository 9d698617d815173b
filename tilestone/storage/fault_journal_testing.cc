#include <algorithm>
#include <random>

#include "tilestone/storage/fault_journal_testing.h"
#include "tilestone/storage/names_internal.h"

namespace tilestone {
namespace {

bool keeps_names(Survival survival) {
  return survival != Survival::kNoUnsyncedEntries && survival != Survival::kNothingUnsynced;
}

constexpr size_t kSector = 512;

// Tears the unsynced bytes [synced, end) of a file: keeps a number of whole blocks, and cuts off
// the rest or replaces it with zeros.
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

// Keeps each unsynced sector or replaces it with zeros, and lets the file end anywhere after
// `synced`.
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

FaultJournal::FaultJournal(const MemoryStorage& storage) {
  for (const std::string& name : storage.directory_names()) made_directory(name);
  for (const auto& [name, file] : storage.entries()) {
    created(name, file);
    synced_bytes_[file] = file->size();
  }
  durable_ = now_;
  pending_.clear();
}

void FaultJournal::apply(Picture& picture, const Change& change) {
  for (const auto& [entry, target] : change) {
    if (target.file == nullptr && target.directory == 0) {
      picture.erase(entry);
    } else {
      picture[entry] = target;
    }
  }
}

uint64_t FaultJournal::directory(std::string_view name) const {
  return name.empty() ? 0 : target(entry(std::string(name))).directory;
}

FaultJournal::Entry FaultJournal::entry(const std::string& name) const {
  const auto [above, last] = split_name(name);
  return {directory(above), std::string(last)};
}

FaultJournal::Target FaultJournal::target(const Entry& entry) const {
  const auto found = now_.find(entry);
  return found == now_.end() ? Target{} : found->second;
}

void FaultJournal::change(Change change) {
  apply(now_, change);
  pending_.push_back(std::move(change));
}

void FaultJournal::created(const std::string& name, std::shared_ptr<MemoryFile> file) {
  change({{entry(name), {std::move(file)}}});
}

void FaultJournal::renamed(const std::string& from, const std::string& to) {
  if (from != to) change({{entry(from), {}}, {entry(to), target(entry(from))}});
}

void FaultJournal::exchanged(const std::string& a, const std::string& b) {
  change({{entry(a), target(entry(b))}, {entry(b), target(entry(a))}});
}

void FaultJournal::removed(const std::string& name) { change({{entry(name), {}}}); }

void FaultJournal::made_directory(const std::string& name) {
  if (name.empty() || directory(name) != 0) return;
  made_directory(std::string(parent_name(name)));
  change({{entry(name), {nullptr, ++directories_}}});
}

void FaultJournal::synced(const std::shared_ptr<MemoryFile>& file) {
  synced_bytes_[file] = file->size();
}

// Makes the directory's changes durable. A rename from or to another directory also makes the
// earlier changes to the same names in that directory durable, because it depends on them.
void FaultJournal::synced_directory(const std::string& name) {
  const uint64_t synced = directory(name);
  std::set<Entry> needed;
  std::vector<bool> durable(pending_.size());
  for (size_t i = pending_.size(); i-- > 0;) {
    for (const Edit& edit : pending_[i]) {
      durable[i] = durable[i] || edit.entry.first == synced || needed.contains(edit.entry);
    }
    if (!durable[i]) continue;
    for (const Edit& edit : pending_[i]) needed.insert(edit.entry);
  }
  std::vector<Change> left;
  for (size_t i = 0; i < pending_.size(); ++i) {
    if (durable[i]) {
      apply(durable_, pending_[i]);
    } else {
      left.push_back(std::move(pending_[i]));
    }
  }
  pending_ = std::move(left);
}

// The files that the root leads to, by name. A snapshot that lacks some changes may contain a
// directory in two places or even within itself; such a cycle is not followed.
std::map<std::string, std::shared_ptr<MemoryFile>> FaultJournal::files_of(const Picture& picture) {
  struct Visit {
    uint64_t directory;
    std::string prefix;
    std::set<uint64_t> above;
  };
  std::map<std::string, std::shared_ptr<MemoryFile>> files;
  std::vector<Visit> todo = {{0, "", {0}}};
  while (!todo.empty()) {
    const Visit visit = std::move(todo.back());
    todo.pop_back();
    for (auto at = picture.lower_bound({visit.directory, ""});
         at != picture.end() && at->first.first == visit.directory; ++at) {
      const auto& [entry, target] = *at;
      const std::string name = visit.prefix + entry.second;
      if (target.file != nullptr) {
        files.emplace(name, target.file);
      } else if (!visit.above.contains(target.directory)) {
        Visit inner{target.directory, name + "/", visit.above};
        inner.above.insert(target.directory);
        todo.push_back(std::move(inner));
      }
    }
  }
  return files;
}

FileImage FaultJournal::surviving_image(Survival survival, uint64_t seed) const {
  std::mt19937_64 random(seed);
  Picture picture = durable_;
  for (const Change& change : pending_) {
    const bool kept = survival == Survival::kRandom ? random() % 2 == 0 : keeps_names(survival);
    if (kept) apply(picture, change);
  }
  FileImage image;
  for (const auto& [name, file] : files_of(picture)) {
    const auto synced = synced_bytes_.find(file);
    const uint64_t bytes = synced == synced_bytes_.end() ? 0 : synced->second;
    image.emplace(name, surviving_bytes(*file, bytes, survival, random));
  }
  return image;
}

}  // namespace tilestone
