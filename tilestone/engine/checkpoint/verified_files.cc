#include "tilestone/engine/checkpoint/verified_files_internal.h"

#include <algorithm>

namespace tilestone {

VerifiedFiles::VerifiedFiles() : state_(std::make_unique<State>()) {}
VerifiedFiles::~VerifiedFiles() = default;

const std::string* VerifiedFiles::State::find(const FileIdentity& file,
                                              const ItemLocation& item) const {
  const auto known = files.find(file);
  if (known == files.end() || !item.checksums) return nullptr;
  const auto found = known->second.items.find(key_of(item));
  return found == known->second.items.end() ? nullptr : &found->second;
}

void VerifiedFiles::State::add(const FileIdentity& file, const ItemLocation& item,
                               const std::string& problem) {
  if (item.checksums) files[file].items.emplace(key_of(item), problem);
}

std::vector<std::vector<std::string>> VerifiedFiles::damaged() const {
  std::vector<std::vector<std::string>> found;
  for (const auto& [identity, file] : state_->files) {
    const bool bad =
        std::ranges::any_of(file.items, [](const auto& each) { return !each.second.empty(); });
    if (bad && file.names.size() > 1) found.push_back(file.names);
  }
  return found;
}

}  // namespace tilestone
