#include <algorithm>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/repair_file_internal.h"

namespace tilestone::engine {
namespace {

constexpr uint64_t kPiece = 8u << 20;  // bytes read at a time
constexpr size_t kMaxFiles = 128;      // open at the same time

}  // namespace

FileMaker::FileMaker(Storage& storage, const Opened& opened, const std::set<uint32_t>& files,
                     Deadline deadline)
    : storage_(storage),
      opened_(opened),
      metadata_(opened.metadata),
      deadline_(std::move(deadline)),
      buffers_(BufferPool::create(4 * kPiece)) {
  for (const RankReport& report : opened.manifest->reports) {
    for (const ReportedFile& file : report.files) written_.emplace(file.name, file.size);
  }
  list_items(files);
  list_parts(files);
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
      Places places = {&tensor.chunks[c].at};
      for (const StoredCopy& copy : metadata_.copies_of(t, c)) places.push_back(&copy.at);
      const Box& box = tensor.chunks[c].box;
      const auto elements = static_cast<uint64_t>(box.numel());
      add(files, std::move(places), elements * itemsize(tensor.dtype), &tensor.key,
          elements == 0 ? without_elements(tensor, box) : nullptr);
    }
  }
  for (const StoredObject& object : metadata_.objects) list(object, files);
  if (opened_.common) list(*opened_.common, files);
}

ItemEncoder& FileMaker::encoder() {
  if (encoder_ == nullptr) encoder_ = opened_.format->encoder();
  return *encoder_;
}

// No copies are made of chunks without elements.
std::shared_ptr<const FileMaker::Encoding> FileMaker::without_elements(const StoredTensor& tensor,
                                                                       const Box& box) {
  const auto recipe = [this, &tensor, &box] {
    TensorItem& item = tensors_.emplace_back();
    item.key = tensor.key;
    item.dtype = tensor.dtype;
    item.global_shape = tensor.shape;
    item.pieces = {{box, TensorView::without_data(tensor.dtype, box.shape)}};
    return encoder().tensor(item, item.pieces.front(), 0);
  };
  std::string from;
  for (const IndexSum& sum : opened_.manifest->index) {
    if (sum.role == IndexRole::kSwitch) from = sum.name;
  }
  return std::make_shared<const Encoding>(Encoding{std::move(from), recipe});
}

void FileMaker::list(const StoredObject& object, const std::set<uint32_t>& files) {
  Places places = {&object.at};
  for (const ItemLocation& copy : object.copies) places.push_back(&copy);
  add(files, std::move(places), 0, &object.key);
  for (const ItemLocation& at : object.unlike) add(files, {&at}, 0, &object.key);
}

// The beginnings and ends of files, of which there are no copies.
void FileMaker::list_parts(const std::set<uint32_t>& files) {
  std::unordered_map<std::string_view, uint32_t> numbers;
  for (const uint32_t file : files) numbers.emplace(metadata_.files[file], file);
  for (const RankReport& report : opened_.manifest->reports) {
    for (const RankReport::FilePart& part : report.parts) {
      const auto file = numbers.find(report.files[part.file].name);
      if (file == numbers.end()) continue;
      const ItemChecksums sums{0, 0, part.crc32};
      parts_.push_back({file->second, Codec::kNone, part.offset, part.length, sums});
      add(files, {&parts_.back()}, 0, nullptr);
    }
  }
}

// The instances of an item share one list of places, because the list may be as long as the number
// of ranks.
void FileMaker::add(const std::set<uint32_t>& files, Places places, uint64_t payload,
                    const std::string* key, std::shared_ptr<const Encoding> encoding) {
  const auto is_wanted = [&](const ItemLocation* at) { return files.contains(at->file); };
  if (std::none_of(places.begin(), places.end(), is_wanted)) return;
  const auto shared = std::make_shared<const Places>(std::move(places));
  for (const ItemLocation* at : *shared) {
    if (is_wanted(at)) items_[at->file].push_back({at, shared, payload, key, encoding});
  }
}

bool FileMaker::look_at(uint32_t file) {
  const auto written = written_.find(metadata_.files[file]);
  if (written == written_.end()) return false;
  const auto info = storage_.stat(metadata_.files[file]);
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
  if (made.was_lost && !made.left.empty()) return std::nullopt;
  return made;
}

// Gaps are zeros, except in files where bytes of removed items remain (Manifest::remains).
void FileMaker::add_gap(uint32_t file, uint64_t begin, uint64_t end, Remade& made) const {
  if (begin == end) return;
  const bool remains = opened_.manifest->remains.contains(metadata_.files[file]) && end <= have_;
  made.sections.push_back({{{remains ? file : Stretch::kZeros, begin, end - begin}}});
}

std::vector<Stretch> FileMaker::bytes_of(const Item& item, Remade& made) {
  const ItemLocation& at = *item.at;
  const std::vector<Stretch> own = {{at.file, at.offset, at.length}};
  if (is_there(at) && crc_of(own) == at.checksums->item_crc32) return own;
  for (const ItemLocation* good : *item.places) {
    if (good == item.at || !good->checksums || !is_there(*good)) continue;
    std::vector<Stretch> parts = from_copy(item, *good);
    if (parts.empty()) continue;
    made.mended_from.emplace(at.offset, metadata_.files[good->file]);
    return parts;
  }
  if (std::vector<Stretch> parts = encoded(item); !parts.empty()) {
    made.mended_from.emplace(at.offset, item.encoding->from);
    return parts;
  }
  made.left.insert(at.offset);
  return own;
}

// The item as an encoder writes it from files of the index; empty if that is not what the save
// wrote.
std::vector<Stretch> FileMaker::encoded(const Item& item) const {
  if (item.encoding == nullptr) return {};
  try {
    const ItemRecipe recipe = item.encoding->recipe();
    auto bytes = std::make_shared<Bytes>();
    for (const Segment& segment : recipe.segments) {
      if (segment.literal == nullptr && segment.size > 0) return {};
      if (segment.literal == nullptr) continue;
      // The checksum of no elements is 0, so nothing is inserted into the literal.
      bytes->insert(bytes->end(), segment.literal->bytes.begin(), segment.literal->bytes.end());
    }
    if (bytes->size() != item.at->length) return {};
    if (crc32(*bytes) != item.at->checksums->item_crc32) return {};
    return {{Stretch::kZeros, 0, bytes->size(), std::move(bytes)}};
  } catch (const Error&) {
    return {};  // the file of the index is damaged: verify says so
  }
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
  const auto info = storage_.stat(metadata_.files[at.file]);
  return info && info->regular && at.length <= info->size && at.offset <= info->size - at.length;
}

uint32_t FileMaker::crc_of(const std::vector<Stretch>& parts) {
  uint32_t crc = 0;
  for (const Stretch& part : parts) {
    each_piece(part, [&](ByteView bytes) { crc = crc32(bytes, crc); });
  }
  return crc;
}

const ReadableFile& FileMaker::open(uint32_t file) {
  const auto found = files_.find(file);
  if (found != files_.end()) return *found->second;
  if (files_.size() >= kMaxFiles) files_.clear();
  return *files_.emplace(file, storage_.open(metadata_.files[file])).first->second;
}

void FileMaker::each_piece(const Stretch& stretch, const std::function<void(ByteView)>& take) {
  if (stretch.encoded != nullptr) return take(*stretch.encoded);
  const bool zeros = stretch.file == Stretch::kZeros;
  Bytes piece;
  for (uint64_t done = 0; done < stretch.size; done += piece.size()) {
    static_cast<void>(deadline_.expired());
    piece.resize(std::min(kPiece, stretch.size - done));
    if (!zeros) {
      const uint64_t begin = stretch.offset + done;
      const ReadOp read{&open(stretch.file), begin, piece.size(), piece.data()};
      storage_.read({&read, 1}, {nullptr, buffers_, deadline_}, [](size_t, ByteView) {});
    }
    take(piece);
  }
}

}  // namespace tilestone::engine
