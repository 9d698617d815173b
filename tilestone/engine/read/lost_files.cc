#include <limits>
#include <span>
#include <string>

#include "tilestone/base/error.h"
#include "tilestone/engine/read/lost_files_internal.h"

namespace tilestone::engine {
namespace {

constexpr uint64_t kUnknown = std::numeric_limits<uint64_t>::max();
constexpr uint64_t kAbsent = kUnknown - 1;  // the file is missing

// Bytes, or one of the values above.
uint64_t ask_size(Storage& storage, const std::string& name) {
  try {
    const auto info = storage.stat(name);
    if (!info) return kAbsent;
    return info->regular ? info->size : kUnknown;
  } catch (const Error&) {
    return kUnknown;  // opening the file reports why
  }
}

}  // namespace

uint64_t LostFiles::size_of(uint32_t file) {
  return context_.sizes->of(
      file, [&] { return ask_size(context_.storage, context_.metadata.files[file]); });
}

bool LostFiles::holds(const ItemLocation& at) {
  const uint64_t size = size_of(at.file);
  if (size == kAbsent) return false;
  return at.length <= size && at.offset <= size - at.length;
}

std::optional<uint32_t> LostFiles::place_besides(uint32_t tensor, uint32_t chunk,
                                                 const std::set<uint32_t>& tried) {
  const Metadata& metadata = context_.metadata;
  const std::span<const StoredCopy> copies = metadata.copies_of(tensor, chunk);
  const size_t count = copies.size() + 1;
  const size_t first = static_cast<size_t>(context_.rank) + tensor + chunk;
  for (size_t turn = 0; turn < count; ++turn) {
    const size_t number = (first + turn) % count;
    const uint32_t place =
        number == 0 ? kNoCopy : static_cast<uint32_t>(&copies[number - 1] - metadata.copies.data());
    if (!tried.contains(place) && holds(metadata.place(tensor, chunk, place))) return place;
  }
  return std::nullopt;
}

std::optional<size_t> LostFiles::place_besides(const StoredObject& object,
                                               const std::set<size_t>& tried) {
  const size_t count = object.copies.size() + 1;
  for (size_t turn = 0; turn < count; ++turn) {
    const size_t place = (static_cast<size_t>(context_.rank) + turn) % count;
    if (!tried.contains(place) && holds(place_of(object, place))) return place;
  }
  return std::nullopt;
}

uint32_t LostFiles::place_of_chunk(uint32_t tensor, uint32_t chunk, uint32_t preferred) {
  const Metadata& metadata = context_.metadata;
  if (metadata.copies.empty() || metadata.copies_of(tensor, chunk).empty()) return preferred;
  const ItemLocation& at = metadata.place(tensor, chunk, preferred);
  if (holds(at)) return preferred;
  const std::optional<uint32_t> found = place_besides(tensor, chunk, {preferred});
  if (found) warn(at, metadata.tensors[tensor].key);
  return found.value_or(preferred);
}

size_t LostFiles::place_of_object(const StoredObject& object, size_t preferred) {
  if (object.copies.empty() || holds(place_of(object, preferred))) return preferred;
  const std::optional<size_t> found = place_besides(object, {preferred});
  if (found) warn(place_of(object, preferred), object.key);
  return found.value_or(preferred);
}

void LostFiles::avoid(std::vector<Transfer>& transfers) {
  if (context_.metadata.copies.empty()) return;
  for (Transfer& t : transfers) t.copy = place_of_chunk(t.tensor, t.chunk, t.copy);
}

void LostFiles::warn(const ItemLocation& at, const std::string& key) {
  if (!context_.warned->first_time(at.file)) return;
  const uint64_t size = size_of(at.file);
  const std::string what =
      size == kAbsent ? "is missing" : "is too short (" + std::to_string(size) + " bytes)";
  log(LogLevel::kWarning,
      context_.metadata.files[at.file] + " " + what + ": \"" + key +
          "\", and whatever else of this file has a copy, is read from other files "
          "(verify reports the damage, repair writes the file again)");
}

}  // namespace tilestone::engine
