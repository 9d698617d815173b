// One file after another:
//
//  1. The lock of the location, a mark that says what holds it, and a note that speaks of the
//     temporary file.
//  2. The new file under a temporary name, durable.
//  3. Its rename over the damaged one, made durable.
//
// Then note and mark go. A crash before 3 leaves the old file, and a temporary one and a mark,
// which the next save or gc removes by their names.
#include "tilestone/engine/repair.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/commit/staging_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/repair_file_internal.h"

namespace tilestone {
namespace engine {
namespace {

constexpr std::string_view kMark = "repairing";

class Repair {
 public:
  Repair(Storage& storage, const Opened& opened, const std::string& id)
      : storage_(storage), opened_(opened), id_(id), maker_(storage, opened) {}

  // Returns the damages that it has mended.
  std::vector<Damage> run(const std::vector<Damage>& damages) {
    std::map<uint32_t, std::vector<Damage>> by_file;
    for (const Damage& damage : damages) {
      const std::vector<std::string>& files = opened_.metadata.files;
      const auto file = std::find(files.begin(), files.end(), damage.file);
      if (file == files.end()) continue;  // of the index, or of none
      by_file[static_cast<uint32_t>(file - files.begin())].push_back(damage);
    }
    std::vector<Damage> mended;
    for (const auto& [file, of_file] : by_file) {
      const std::optional<Remade> made = maker_.make(file);
      if (!made) continue;
      std::vector<Damage> gone = mended_by(*made, of_file);
      if (gone.empty()) continue;
      if (mended.empty()) leave_note(storage_, id_, {}, Deadline::never());
      replace(file, made->parts);
      std::move(gone.begin(), gone.end(), std::back_inserter(mended));
    }
    if (!mended.empty()) remove_files(storage_, std::vector{note_name(id_)});
    return mended;
  }

 private:
  // Those of the damages, all of one file, that are not there in the new one.
  static std::vector<Damage> mended_by(const Remade& made, const std::vector<Damage>& damages) {
    std::vector<Damage> gone;
    for (Damage damage : damages) {
      // The damage may begin within the item.
      const auto left = made.left.upper_bound(damage.offset);
      const auto from = made.mended_from.upper_bound(damage.offset);
      const bool in_item = !damage.key.empty();
      if (in_item && from != made.mended_from.begin()) {
        const auto item = std::prev(from);
        const bool is_later = left == made.left.begin() || *std::prev(left) < item->first;
        if (!is_later) continue;
        damage.intact_in = item->second;
      } else if (in_item || made.left.contains(damage.offset)) {
        continue;
      }
      gone.push_back(std::move(damage));
    }
    return gone;
  }

  void replace(uint32_t file, const std::vector<Stretch>& parts) {
    const std::string temporary = temporary_name(id_, "repair");
    try {
      write(temporary, parts);
      storage_.rename(temporary, opened_.metadata.files[file], true);
    } catch (...) {
      if (remove_files(storage_, std::vector{temporary})) {
        remove_files(storage_, std::vector{note_name(id_)});
      }
      throw;
    }
    storage_.sync_directory("");
    maker_.forget(file);
  }

  void write(const std::string& name, const std::vector<Stretch>& parts) {
    uint64_t size = 0;
    for (const Stretch& part : parts) size += part.size;
    const auto file = storage_.create(name, size);
    for (const Stretch& part : parts) {
      maker_.each_piece(part, [&](ByteView bytes) { file->append(bytes); });
    }
    file->sync(Deadline::never());
    file->close();
  }

  Storage& storage_;
  const Opened& opened_;
  const std::string id_;
  FileMaker maker_;
};

// Says what holds the location's lock, as long as it is there.
class Mark {
 public:
  Mark(Storage& storage, const std::string& id)
      : storage_(storage), name_(temporary_name(id, kMark)) {
    storage_.create(name_)->close();
  }
  ~Mark() { remove_files(storage_, std::vector{name_}); }
  Mark(const Mark&) = delete;
  Mark& operator=(const Mark&) = delete;

  static bool stands(Storage& storage) {
    const std::string end = temporary_name("", kMark).substr(kOwnDirectory.size() + 1);
    const std::vector<std::string> names = storage.list_files(std::string(kOwnDirectory) + "/");
    return std::any_of(names.begin(), names.end(),
                       [&](const std::string& name) { return name.ends_with(end); });
  }

 private:
  Storage& storage_;
  const std::string name_;
};

}  // namespace
}  // namespace engine

RepairReport repair(const Location& location, const OpenOptions& options,
                    const ProgressFn& progress) {
  const std::shared_ptr<Storage>& storage = location.shared();
  const auto lock = engine::try_lock_location(*storage);
  if (lock == nullptr) {
    engine::fail_under_way(*storage, engine::Mark::stands(*storage) ? "a repair" : "a save");
  }
  const std::string id = engine::random_save_id();
  const engine::Mark mark(*storage, id);
  RepairReport report;
  {
    const VerifyReport before = Checkpoint::open(location, options).verify(progress);
    engine::Found found = engine::find_checkpoint(storage, options.format);
    const engine::Opened opened =
        engine::open_description(std::move(found.description), found.format.format);
    if (opened.manifest) {
      report.mended = engine::Repair(*storage, opened, id).run(before.damages);
    }
    if (report.mended.empty()) {
      report.now = before;
      return report;
    }
  }
  report.now = Checkpoint::open(location, options).verify(progress);
  return report;
}

}  // namespace tilestone
