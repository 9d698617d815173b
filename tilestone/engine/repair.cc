// One file after another:
//
//  1. The lock of the location, and a note that speaks of the temporary file.
//  2. The new file under a temporary name, durable.
//  3. Its rename over the damaged one, made durable.
//
// Then the note goes. A crash before 3 leaves the old file, and a temporary one that the next save
// or gc removes by the note.
#include "tilestone/engine/repair.h"

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/commit/staging_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"

namespace tilestone {
namespace engine {
namespace {

constexpr uint64_t kPiece = 8u << 20;  // bytes that are copied at a time

// Bytes of a file of the checkpoint.
struct Stretch {
  uint32_t file = 0;
  uint64_t offset = 0;
  uint64_t size = 0;
};

// An item and how it is made anew.
struct Mended {
  ItemLocation at;
  std::vector<Stretch> parts;
};

class Repair {
 public:
  Repair(Storage& storage, const Checkpoint& checkpoint)
      : storage_(storage), metadata_(checkpoint.metadata()) {}

  // Returns the damages that it has mended.
  std::vector<Damage> run(const std::vector<Damage>& damages) {
    std::map<std::string, std::vector<Mended>> items;  // by file
    std::vector<Damage> mended;
    for (const Damage& damage : damages) {
      const auto item = mend(damage);
      if (!item) continue;
      items[damage.file].push_back(*item);
      mended.push_back(damage);
    }
    if (items.empty()) return mended;
    leave_note(storage_, id_, {}, Deadline::never());
    for (auto& [file, of_file] : items) replace(file, std::move(of_file));
    remove_files(storage_, std::vector{note_name(id_)});
    return mended;
  }

 private:
  // nullopt: nothing that is intact makes it what its save wrote.
  std::optional<Mended> mend(const Damage& damage) {
    if (damage.intact_in.empty()) return std::nullopt;
    const StoredTensor& tensor = *metadata_.find_tensor(damage.key);
    const auto number = static_cast<uint32_t>(&tensor - metadata_.tensors.data());
    for (uint32_t c = 0; c < tensor.chunks.size(); ++c) {
      const ItemLocation* bad = nullptr;
      const ItemLocation* good = nullptr;
      const auto look = [&](const ItemLocation& at) {
        const bool here = metadata_.files[at.file] == damage.file && damage.offset >= at.offset &&
                          damage.offset - at.offset < at.length;
        if (here) bad = &at;
        if (metadata_.files[at.file] == damage.intact_in) good = &at;
      };
      look(tensor.chunks[c].at);
      for (const StoredCopy& copy : metadata_.copies_of(number, c)) look(copy.at);
      if (bad == nullptr || good == nullptr) continue;
      const auto elements = static_cast<uint64_t>(tensor.chunks[c].box.numel());
      return from_copy(*bad, *good, elements * itemsize(tensor.dtype));
    }
    return std::nullopt;
  }

  // Its own bytes around the copy's elements; else, should they be damaged, the copy's, which are
  // the same where they begin at the same place in a page.
  std::optional<Mended> from_copy(const ItemLocation& bad, const ItemLocation& good,
                                  uint64_t payload) {
    if (!bad.checksums || !good.checksums) return std::nullopt;
    const uint64_t head = bad.checksums->payload_offset;
    const uint64_t tail = head + payload;
    const uint64_t good_tail = good.checksums->payload_offset + payload;
    if (tail > bad.length || good_tail > good.length) return std::nullopt;
    Mended mended{bad,
                  {{bad.file, bad.offset, head},
                   {good.file, good.offset + good.checksums->payload_offset, payload},
                   {bad.file, bad.offset + tail, bad.length - tail}}};
    if (crc_of(mended.parts) == bad.checksums->item_crc32) return mended;
    if (good.length != bad.length) return std::nullopt;
    mended.parts = {{good.file, good.offset, good.length}};
    if (crc_of(mended.parts) == bad.checksums->item_crc32) return mended;
    return std::nullopt;
  }

  uint32_t crc_of(const std::vector<Stretch>& parts) {
    uint32_t crc = 0;
    for (const Stretch& part : parts) {
      each_piece(part, [&](ByteView bytes) { crc = crc32(bytes, crc); });
    }
    return crc;
  }

  void each_piece(const Stretch& stretch, const std::function<void(ByteView)>& take) {
    std::unique_ptr<ReadableFile>& file = files_[stretch.file];
    if (!file) file = storage_.open(metadata_.files[stretch.file]);
    Bytes piece;
    for (uint64_t done = 0; done < stretch.size; done += piece.size()) {
      piece.resize(std::min(kPiece, stretch.size - done));
      const ReadOp read{file.get(), stretch.offset + done, piece.size(), piece.data()};
      storage_.read({&read, 1}, {nullptr, buffers_}, [](size_t, ByteView) {});
      take(piece);
    }
  }

  void replace(const std::string& name, std::vector<Mended> items) {
    const uint32_t number = items.front().at.file;
    std::sort(items.begin(), items.end(),
              [](const Mended& a, const Mended& b) { return a.at.offset < b.at.offset; });
    std::vector<Stretch> parts;
    uint64_t end = 0;
    for (const Mended& item : items) {
      parts.push_back({number, end, item.at.offset - end});
      parts.insert(parts.end(), item.parts.begin(), item.parts.end());
      end = item.at.offset + item.at.length;
    }
    parts.push_back({number, end, files_.at(number)->size() - end});
    const std::string temporary = temporary_name(id_, "repair");
    try {
      write(temporary, parts);
      storage_.rename(temporary, name, true);
    } catch (...) {
      if (remove_files(storage_, std::vector{temporary})) {
        remove_files(storage_, std::vector{note_name(id_)});
      }
      throw;
    }
    storage_.sync_directory("");
    files_.erase(number);
  }

  void write(const std::string& name, const std::vector<Stretch>& parts) {
    uint64_t size = 0;
    for (const Stretch& part : parts) size += part.size;
    const auto file = storage_.create(name, size);
    for (const Stretch& part : parts) {
      each_piece(part, [&](ByteView bytes) { file->append(bytes); });
    }
    file->sync(Deadline::never());
    file->close();
  }

  Storage& storage_;
  const Metadata& metadata_;
  const std::string id_ = random_save_id();
  const std::shared_ptr<BufferPool> buffers_ = BufferPool::create(4 * kPiece);
  std::map<uint32_t, std::unique_ptr<ReadableFile>> files_;  // that are open
};

}  // namespace
}  // namespace engine

RepairReport repair(const Location& location, const OpenOptions& options,
                    const ProgressFn& progress) {
  const std::shared_ptr<Storage>& storage = location.shared();
  const auto lock = engine::try_lock_location(*storage);
  if (lock == nullptr) engine::fail_under_way(*storage, "a save");
  RepairReport report;
  {
    const Checkpoint checkpoint = Checkpoint::open(location, options);
    const VerifyReport before = checkpoint.verify(progress);
    report.mended = engine::Repair(*storage, checkpoint).run(before.damages);
    if (report.mended.empty()) {
      report.now = before;
      return report;
    }
  }
  report.now = Checkpoint::open(location, options).verify(progress);
  return report;
}

}  // namespace tilestone
