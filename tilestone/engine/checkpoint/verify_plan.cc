#include "tilestone/engine/checkpoint/verify_plan_internal.h"

#include <algorithm>
#include <set>
#include <string_view>
#include <utility>

#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/engine/read/range_reader_internal.h"
#include "tilestone/geometry/coverage.h"

namespace tilestone::engine {
namespace {

using Kind = VerifyItem::Kind;

class VerifyPlanner {
 public:
  VerifyPlanner(const ReadContext& context, const std::vector<int64_t>& sizes,
                const std::map<std::string, uint64_t>& written,
                const std::vector<ItemLocation>& parts, const StoredObject* common)
      : context_(context), sizes_(sizes), written_(written), parts_(parts), common_(common) {}

  VerifyPlan run() {
    list_items();
    find_holes();
    for (uint32_t file = 0; file < sizes_.size(); ++file) plan_file(file);
    return std::move(plan_);
  }

 private:
  uint64_t buffer() const { return context_.buffers->buffer_bytes(); }
  const std::string& name(uint32_t file) const { return context_.metadata.files[file]; }

  void damage(uint32_t file, uint64_t offset, uint64_t size, std::string problem, uint32_t item,
              bool unsafe = false) {
    plan_.damages.push_back(
        {{name(file), offset, size, *plan_.items[item].key, std::move(problem), unsafe}, item});
  }
  void damage_of_file(uint32_t file, uint64_t offset, uint64_t size, std::string problem) {
    plan_.damages.push_back(
        {{name(file), offset, size, "", std::move(problem)}, VerifyRange::kGap, true});
  }

  void list_items() {
    const Metadata& metadata = context_.metadata;
    for (uint32_t t = 0; t < metadata.tensors.size(); ++t) {
      const StoredTensor& tensor = metadata.tensors[t];
      for (uint32_t c = 0; c < tensor.chunks.size(); ++c) {
        if (tensor.first_of_item(c) != c) continue;
        plan_.items.push_back({&tensor.key, &tensor.chunks[c].at, Kind::kTensor, {t, c}});
      }
    }
    for (uint32_t i = 0; i < metadata.copies.size(); ++i) {
      const StoredCopy& copy = metadata.copies[i];
      const std::string& key = metadata.tensors[copy.tensor].key;
      plan_.items.push_back({&key, &copy.at, Kind::kTensor, {copy.tensor, copy.chunk, i}});
    }
    for (const StoredObject& object : metadata.objects) list(object);
    if (common_ != nullptr) list(*common_);
    for (const ItemLocation& part : parts_) {
      static const std::string kNoKey;
      plan_.items.push_back({&kNoKey, &part, Kind::kFilePart, {}});
    }
    by_file_.resize(metadata.files.size());
    for (uint32_t i = 0; i < plan_.items.size(); ++i) {
      by_file_[plan_.items[i].at->file].push_back(i);
    }
  }

  void list(const StoredObject& object) {
    // A tensor without elements has no item, and an object in the index neither.
    if ((!object.unsupported.empty() || object.value) && object.at.length == 0) return;
    const auto add = [&](const ItemLocation& at) {
      plan_.items.push_back({&object.key, &at, Kind::kObject, {}, &object});
    };
    add(object.at);
    for (const ItemLocation& copy : object.copies) add(copy);
    for (const ItemLocation& copy : object.unlike) add(copy);
  }

  // Reports elements that no chunk holds, because a writer died or a rank's metadata is lost.
  void find_holes() {
    std::vector<Box> boxes;
    for (const StoredTensor& tensor : context_.metadata.tensors) {
      boxes.clear();
      for (const StoredChunk& chunk : tensor.chunks) boxes.push_back(chunk.box);
      const auto hole =
          with_key(tensor.key, [&] { return find_uncovered(Box::whole(tensor.shape), boxes); });
      if (!hole) continue;
      plan_.damages.push_back({{"", 0, 0, tensor.key,
                                "no chunk holds the elements " + to_string(*hole) +
                                    " of the tensor of shape " + to_string(tensor.shape)}});
    }
  }

  void plan_file(uint32_t file) {
    if (sizes_[file] == kRefused) return;
    if (sizes_[file] == kMissing) {
      damage_of_file(file, 0, 0, "the file is missing");
      return;
    }
    ++plan_.files;
    const auto size = static_cast<uint64_t>(sizes_[file]);
    const auto expected = written_.find(name(file));
    if (expected != written_.end() && expected->second != size) {
      const uint64_t least = std::min(size, expected->second);
      damage_of_file(file, least, std::max(size, expected->second) - least,
                     "the file has " + std::to_string(size) + " bytes, but its save wrote " +
                         std::to_string(expected->second));
    }
    plan_items(file, size);
    add_if_short(file, size, expected != written_.end() ? expected->second : 0);
  }

  // `written`: 0: not recorded.
  void add_if_short(uint32_t file, uint64_t size, uint64_t written) {
    ShortFile found{name(file), size, written};
    std::set<std::string_view> keys;
    for (const uint32_t index : by_file_[file]) {
      const VerifyItem& item = plan_.items[index];
      const auto end = try_add(item.at->offset, item.at->length);
      if (end && *end <= size) continue;
      if (end && written == 0) found.expected = std::max(found.expected, *end);
      if (keys.empty()) found.first_key = *item.key;
      if (!item.key->empty()) keys.insert(*item.key);
    }
    found.keys = keys.size();
    if (found.expected > size) plan_.short_files.push_back(std::move(found));
  }

  // Plans the items of a file of `size` bytes and the gaps between them. If an item reaches beyond
  // the end of the file, no gaps are planned after its start: those bytes may belong to it.
  void plan_items(uint32_t file, uint64_t size) {
    std::vector<uint32_t>& items = by_file_[file];
    std::sort(items.begin(), items.end(), [&](uint32_t a, uint32_t b) {
      return plan_.items[a].at->offset < plan_.items[b].at->offset;
    });
    uint64_t end = 0;
    bool was_cut = false;
    const auto gap_until = [&](uint64_t offset) {
      if (!was_cut) add_gap(file, end, offset);
    };
    for (uint32_t index : items) {
      const VerifyItem& item = plan_.items[index];
      const auto item_end = try_add(item.at->offset, item.at->length);
      if (!item_end || *item_end > size) {
        say_beyond_end(file, size, index);
        gap_until(std::min(item.at->offset, size));
        was_cut = true;
        continue;
      }
      if (item.at->offset < end && context_.format.items_may_share_bytes()) {
        add_item(file, index);
        end = std::max(end, *item_end);
        continue;
      }
      if (item.at->offset < end) {
        damage(file, item.at->offset, std::min(end, *item_end) - item.at->offset,
               "the item overlaps the one before it", index);
        plan_.alone.push_back(index);
        end = std::max(end, *item_end);
        continue;
      }
      gap_until(item.at->offset);
      add_item(file, index);
      end = *item_end;
    }
    gap_until(size);
  }

  void say_beyond_end(uint32_t file, uint64_t size, uint32_t index) {
    const ItemLocation& at = *plan_.items[index].at;
    damage(file, std::min(at.offset, size), 0,
           "the item of " + std::to_string(at.length) + " bytes at offset " +
               std::to_string(at.offset) + " reaches beyond the file's " + std::to_string(size) +
               " bytes",
           index);
    plan_.damages.back().damage.beyond_end = true;
  }

  void add_gap(uint32_t file, uint64_t begin, uint64_t end) {
    for (; begin < end; begin += std::min(buffer(), end - begin)) {
      add_range({file, VerifyRange::kGap, begin, begin + std::min(buffer(), end - begin)});
    }
  }

  void add_item(uint32_t file, uint32_t index) {
    const VerifyItem& item = plan_.items[index];
    const ItemLocation& at = *item.at;
    if (at.length <= buffer()) {
      add_range({file, index, at.offset, at.offset + at.length, true});
    } else if (at.checksums && at.codec == Codec::kNone) {
      plan_.expected[index] = at.checksums->item_crc32;
      add_large(file, index, 0, at.length, true);
    } else if (at.codec == Codec::kNone && item.kind == Kind::kTensor) {
      add_foreign_tensor(file, index);
    } else {
      plan_.alone.push_back(index);
    }
  }

  // Plans a large tensor of another writer: the checksum covers its record; the bytes around the
  // record are parsed.
  void add_foreign_tensor(uint32_t file, uint32_t index) {
    const VerifyItem& item = plan_.items[index];
    try {
      const StoredPayload payload = find_payloads(context_, {&item.chunk, 1}).front();
      const uint64_t record_end = payload.record_offset + payload.record_size;
      add_large(file, index, 0, payload.record_offset, false);
      add_large(file, index, payload.record_offset, record_end, true);
      add_large(file, index, record_end, item.at->length, false);
      if (payload.record_crc32) {
        plan_.expected[index] = *payload.record_crc32;
      } else {
        ++plan_.unchecked;
      }
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kIo && !is_unreadable(error)) throw;
      damage(file, item.at->offset, item.at->length,
             is_unreadable(error) ? unreadable_problem(error) : error.message(), index,
             error.code() == ErrorCode::kUnsafe);
    }
  }

  // Bytes [begin, end) of the item, a buffer at a time.
  void add_large(uint32_t file, uint32_t index, uint64_t begin, uint64_t end, bool summed) {
    const uint64_t start = plan_.items[index].at->offset;
    for (; begin < end; begin += std::min(buffer(), end - begin)) {
      add_range({file, index, start + begin, start + begin + std::min(buffer(), end - begin), false,
                 summed});
    }
  }

  void add_range(const VerifyRange& range) {
    plan_.bytes += range.end - range.begin;
    plan_.ranges.push_back(range);
  }

  const ReadContext& context_;
  const std::vector<int64_t>& sizes_;
  const std::map<std::string, uint64_t>& written_;
  const std::vector<ItemLocation>& parts_;
  const StoredObject* const common_;
  std::vector<std::vector<uint32_t>> by_file_;  // item indices, by file
  VerifyPlan plan_;
};

}  // namespace

std::string unreadable_problem(const Error& error) {
  return "the disk can't read these bytes: " + error.message();
}

std::vector<const ItemLocation*> places_of(const Metadata& metadata, const VerifyItem& item) {
  std::vector<const ItemLocation*> places;
  if (item.kind == Kind::kTensor) {
    places.push_back(&metadata.place(item.chunk.tensor, item.chunk.chunk, kNoCopy));
    for (const StoredCopy& copy : metadata.copies_of(item.chunk.tensor, item.chunk.chunk)) {
      places.push_back(&copy.at);
    }
  } else if (item.object != nullptr) {
    places.push_back(&item.object->at);
    for (const ItemLocation& copy : item.object->copies) places.push_back(&copy);
  }
  const auto is_one = std::find(places.begin(), places.end(), item.at) != places.end();
  return is_one ? places : std::vector{item.at};
}

std::map<std::string, uint64_t> written_sizes(const Opened& opened) {
  std::map<std::string, uint64_t> sizes;
  if (!opened.manifest) return sizes;
  for (const Receipt& rank : opened.manifest->receipts) {
    for (const ReceiptFile& file : rank.files) sizes.emplace(file.name, file.size);
  }
  return sizes;
}

std::vector<ItemLocation> parts_of_files(const Opened& opened) {
  std::vector<ItemLocation> parts;
  if (!opened.manifest) return parts;
  const auto numbers = files_by_name(opened.metadata);
  for (const Receipt& rank : opened.manifest->receipts) {
    for (const Receipt::FilePart& part : rank.parts) {
      parts.push_back({numbers.at(rank.files[part.file].name), Codec::kNone, part.offset,
                       part.length, ItemChecksums{0, 0, part.crc32}});
    }
  }
  return parts;
}

std::unordered_map<std::string_view, uint32_t> files_by_name(const Metadata& metadata) {
  std::unordered_map<std::string_view, uint32_t> files;
  for (uint32_t i = 0; i < metadata.files.size(); ++i) files.emplace(metadata.files[i], i);
  return files;
}

VerifyPlan plan_verify(const ReadContext& context, const std::vector<int64_t>& sizes,
                       const std::map<std::string, uint64_t>& written,
                       const std::vector<ItemLocation>& parts, const StoredObject* common) {
  return VerifyPlanner(context, sizes, written, parts, common).run();
}

}  // namespace tilestone::engine
