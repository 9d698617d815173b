#include <algorithm>
#include <utility>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/checkpoint/repair_file_internal.h"
#include "tilestone/engine/checkpoint/verify_plan_internal.h"
#include "tilestone/engine/read/range_reader_internal.h"

namespace tilestone::engine {
namespace {

constexpr uint64_t kMendedBlock = 8u << 20;  // bytes read at a time
constexpr size_t kMaxFiles = 128;            // open at the same time

}  // namespace

std::optional<FileInfo> stat_for_repair(Storage& storage, const std::string& name) {
  try {
    return storage.stat(name);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsafe) throw;
    return FileInfo{0, false};
  }
}

FileMaker::FileMaker(Storage& storage, const Opened& opened, const std::set<uint32_t>& files,
                     Deadline deadline)
    : storage_(storage),
      opened_(opened),
      metadata_(opened.metadata),
      deadline_(std::move(deadline)),
      parts_(parts_of_files(opened)),
      written_(written_sizes(opened)),
      from_index_(opened),
      buffers_(BufferPool::create(4 * kMendedBlock)) {
  list_items(files);
  for (const ItemLocation& part : parts_) add(files, {&part}, 0, nullptr);  // there are no copies
  for (auto& [file, items] : items_) {
    std::sort(items.begin(), items.end(),
              [](const Item& a, const Item& b) { return a.at->offset < b.at->offset; });
  }
}

void FileMaker::list_items(const std::set<uint32_t>& files) {
  for (uint32_t t = 0; t < metadata_.tensors.size(); ++t) {
    const StoredTensor& tensor = metadata_.tensors[t];
    for (uint32_t c = 0; c < tensor.chunks.size(); ++c) {
      if (tensor.first_of_item(c) != c) continue;
      Locations places = {&tensor.chunks[c].at};
      for (const StoredCopy& copy : metadata_.copies_of(t, c)) places.push_back(&copy.at);
      const StoredChunk& chunk = tensor.chunks[c];
      const auto elements = static_cast<uint64_t>(chunk.box.numel());
      Anew anew;
      if (elements == 0) {
        anew = [this, of = &tensor, empty = &chunk](const ItemLocation& at) {
          return from_index_.chunk(*of, *empty, at);
        };
      }
      add(files, std::move(places), elements * itemsize(tensor.dtype), &tensor.key, anew);
    }
  }
  for (const StoredObject& object : metadata_.objects) list(object, files);
  const Anew common = [this](const ItemLocation& at) { return from_index_.common(at); };
  if (opened_.common) list(*opened_.common, files, common);
}

void FileMaker::list(const StoredObject& object, const std::set<uint32_t>& files,
                     const Anew& anew) {
  Locations places = {&object.at};
  for (const ItemLocation& copy : object.copies) places.push_back(&copy);
  add(files, std::move(places), 0, &object.key, anew);
  for (const ItemLocation& at : object.unlike) add(files, {&at}, 0, &object.key);
}

// The instances of an item share one list of places, because the list may be as long as the number
// of ranks.
void FileMaker::add(const std::set<uint32_t>& files, Locations places, uint64_t payload,
                    const std::string* key, const Anew& anew) {
  const auto is_wanted = [&](const ItemLocation* at) { return files.contains(at->file); };
  if (std::none_of(places.begin(), places.end(), is_wanted)) return;
  const auto shared = std::make_shared<const Locations>(std::move(places));
  for (const ItemLocation* at : *shared) {
    if (is_wanted(at)) items_[at->file].push_back({at, shared, payload, key, anew});
  }
}

uint64_t FileMaker::written_size(uint32_t file) const {
  const auto written = written_.find(metadata_.files[file]);
  return written == written_.end() ? 0 : written->second;
}

bool FileMaker::look_at(uint32_t file) {
  const auto written = written_.find(metadata_.files[file]);
  if (written == written_.end()) return false;
  const auto info = stat_for_repair(storage_, metadata_.files[file]);
  if (info && !info->regular) return false;
  size_ = written->second;
  have_ = info ? info->size : 0;
  return true;
}

std::optional<Remade> FileMaker::make(uint32_t file) {
  if (!look_at(file)) return std::nullopt;
  Remade made;
  uint64_t end = 0;
  for (const Item& item : items_[file]) {
    const ItemLocation& at = *item.at;
    if (!at.checksums || at.offset < end || at.length > size_ || at.offset > size_ - at.length) {
      return std::nullopt;
    }
    add_gap(file, end, at.offset, made);
    Section section{bytes_of(item, made), at.checksums->item_crc32, item.key};
    if (made.left.contains(at.offset)) section.crc32.reset();
    made.sections.push_back(std::move(section));
    end = at.offset + at.length;
  }
  add_gap(file, end, size_, made);
  made.was_lost = have_ < size_;
  made.changes = made.changes || have_ != size_ || !made.mended_from.empty();
  if ((made.was_lost && !made.left.empty()) || made.left_unreadable) return std::nullopt;
  return made;
}

// Gaps are zeros, except in files where bytes of removed items remain (Manifest::remains).
void FileMaker::add_gap(uint32_t file, uint64_t begin, uint64_t end, Remade& made) {
  if (begin == end) return;
  // What the disk can't read of removed items is replaced by zeros: these bytes belong to no item.
  const bool remains = opened_.manifest->remains.contains(metadata_.files[file]) && end <= have_ &&
                       crc_of({{file, begin, end - begin}}).has_value();
  made.sections.push_back({{{remains ? file : Stretch::kZeros, begin, end - begin}}});
  if (remains || end > have_ || made.changes) return;
  const Stretch zeros{Stretch::kZeros, 0, end - begin};
  made.changes = crc_of({{file, begin, end - begin}}) != crc_of({zeros});
}

std::vector<Stretch> FileMaker::bytes_of(const Item& item, Remade& made) {
  const ItemLocation& at = *item.at;
  const std::vector<Stretch> own = {{at.file, at.offset, at.length}};
  const auto found = is_there(at) ? crc_of(own) : std::nullopt;
  if (found == at.checksums->item_crc32) return own;
  for (const ItemLocation* good : *item.places) {
    if (good == item.at || !good->checksums || !is_there(*good)) continue;
    std::vector<Stretch> parts = from_copy(item, *good);
    if (parts.empty()) continue;
    made.mended_from.emplace(at.offset, metadata_.files[good->file]);
    return parts;
  }
  if (const auto made_anew = item.anew ? item.anew(at) : std::nullopt) {
    made.mended_from.emplace(at.offset, made_anew->file);
    return {{Stretch::kZeros, 0, made_anew->bytes->size(), made_anew->bytes}};
  }
  made.left.insert(at.offset);
  made.left_unreadable = made.left_unreadable || !found;
  return own;
}

// The whole copy; or, if only the elements are damaged, the item's own bytes around the copy's
// elements. Empty if neither gives the bytes that the save wrote.
std::vector<Stretch> FileMaker::from_copy(const Item& item, const ItemLocation& good) {
  const ItemLocation& bad = *item.at;
  std::vector<Stretch> parts = {{good.file, good.offset, good.length}};
  if (good.length == bad.length && crc_of(parts) == bad.checksums->item_crc32) return parts;
  const uint64_t head = bad.checksums->payload_offset;
  const uint64_t tail = head + item.payload;
  const bool fits = tail <= bad.length && good.checksums->payload_offset <= good.length &&
                    item.payload <= good.length - good.checksums->payload_offset;
  if (item.payload == 0 || !fits || !is_there(bad)) return {};
  parts = {{bad.file, bad.offset, head},
           {good.file, good.offset + good.checksums->payload_offset, item.payload},
           {bad.file, bad.offset + tail, bad.length - tail}};
  if (crc_of(parts) == bad.checksums->item_crc32) return parts;
  return {};
}

bool FileMaker::is_there(const ItemLocation& at) {
  const auto info = stat_for_repair(storage_, metadata_.files[at.file]);
  return info && info->regular && at.length <= info->size && at.offset <= info->size - at.length;
}

std::optional<uint32_t> FileMaker::crc_of(const std::vector<Stretch>& parts) {
  uint32_t crc = 0;
  try {
    for (const Stretch& part : parts) {
      each_block(part, [&](ByteView bytes) { crc = crc32(bytes, crc); });
    }
  } catch (const Error& error) {
    if (!is_unreadable(error)) throw;
    return std::nullopt;
  }
  return crc;
}

const ReadableFile& FileMaker::open(uint32_t file) {
  const auto found = files_.find(file);
  if (found != files_.end()) return *found->second;
  if (files_.size() >= files_at_once(kMaxFiles)) files_.clear();
  return *files_.emplace(file, storage_.open(metadata_.files[file])).first->second;
}

void FileMaker::each_block(const Stretch& stretch, const std::function<void(ByteView)>& visit) {
  if (stretch.encoded != nullptr) return visit(*stretch.encoded);
  const bool zeros = stretch.file == Stretch::kZeros;
  Bytes block;
  for (uint64_t done = 0; done < stretch.size; done += block.size()) {
    static_cast<void>(deadline_.expired());
    block.resize(std::min(kMendedBlock, stretch.size - done));
    if (!zeros) {
      const uint64_t begin = stretch.offset + done;
      const ReadOp read{&open(stretch.file), begin, block.size(), block.data()};
      storage_.read({&read, 1}, {nullptr, buffers_, deadline_}, [](size_t, ByteView) {});
    }
    visit(block);
  }
}

}  // namespace tilestone::engine
