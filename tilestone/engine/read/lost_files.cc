#include <iterator>
#include <limits>
#include <string>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/log.h"
#include "tilestone/engine/read/lost_files_internal.h"

namespace tilestone::engine {
namespace {

constexpr uint64_t kUnknown = std::numeric_limits<uint64_t>::max();

// 0: missing.
uint64_t size_of(Storage& storage, const std::string& name) {
  try {
    const auto info = storage.stat(name);
    if (!info) return 0;
    return info->regular ? info->size : kUnknown;
  } catch (const Error&) {
    return kUnknown;  // opening it says why
  }
}

}  // namespace

bool LostFiles::holds(const ItemLocation& at) {
  const auto [known, is_new] = sizes_.try_emplace(at.file, 0);
  if (is_new) known->second = size_of(context_.storage, context_.metadata.files[at.file]);
  const uint64_t size = known->second;
  return at.length <= size && at.offset <= size - at.length;
}

uint32_t LostFiles::place_of_chunk(uint32_t tensor, uint32_t chunk, uint32_t preferred) {
  const Metadata& metadata = context_.metadata;
  if (metadata.copies.empty()) return preferred;
  const std::span<const StoredCopy> copies = metadata.copies_of(tensor, chunk);
  const ItemLocation& at = metadata.place(tensor, chunk, preferred);
  if (copies.empty() || holds(at)) return preferred;
  uint32_t found = preferred;
  if (holds(metadata.place(tensor, chunk, kNoCopy))) {
    found = kNoCopy;
  } else {
    for (const StoredCopy& copy : copies) {
      if (found != preferred || !holds(copy.at)) continue;
      found = static_cast<uint32_t>(&copy - metadata.copies.data());
    }
  }
  if (found != preferred) warn(at, metadata.tensors[tensor].key);
  return found;
}

size_t LostFiles::place_of_object(const StoredObject& object, size_t preferred) {
  if (object.copies.empty() || holds(place_of(object, preferred))) return preferred;
  for (size_t place = 0; place <= object.copies.size(); ++place) {
    if (!holds(place_of(object, place))) continue;
    warn(place_of(object, preferred), object.key);
    return place;
  }
  return preferred;
}

void LostFiles::avoid(std::vector<Transfer>& transfers) {
  if (context_.metadata.copies.empty()) return;
  for (Transfer& t : transfers) t.copy = place_of_chunk(t.tensor, t.chunk, t.copy);
}

std::vector<Transfer> LostFiles::take_avoided(std::vector<Transfer>& transfers) {
  std::vector<Transfer> avoided, others;
  if (context_.metadata.copies.empty()) return avoided;
  for (Transfer& t : transfers) {
    const uint32_t place = place_of_chunk(t.tensor, t.chunk, t.copy);
    const bool is_lost = place != t.copy;
    t.copy = place;
    (is_lost ? avoided : others).push_back(std::move(t));
  }
  transfers = std::move(others);
  return avoided;
}

void LostFiles::warn(const ItemLocation& at, const std::string& key) {
  if (!context_.warned->first_time(at.file)) return;
  const bool missing = sizes_.at(at.file) == 0;
  log(LogLevel::kWarning,
      context_.metadata.files[at.file] + (missing ? " is missing" : " is too short") + ": \"" +
          key +
          "\", and what else it should hold, is read from other files as far as they hold it too "
          "(verify says what is damaged, repair writes the file anew)");
}

}  // namespace tilestone::engine
