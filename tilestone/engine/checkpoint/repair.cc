// The checkpoint is verified first. Files are rebuilt only if something is damaged. Then, under the
// lock of the location, a mark is created that says that a repair holds the lock. For each damaged
// file that can be rebuilt:
//
//  1. Before the first one, a note is left that names the temporary file.
//  2. The new file is written under a temporary name and synced. Each item has the checksum that
//     the save recorded.
//  3. The new file is renamed over the damaged one, and the directory is synced.
//
// At the end note and mark are removed. A crash before step 3 leaves the old file, and possibly a
// temporary file, a note and a mark. The next repair that finds damage, save or gc recognizes them
// by their names and removes them.
#include "tilestone/engine/checkpoint/checkpoint.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "tilestone/base/checksum.h"
#include "tilestone/base/deadline.h"
#include "tilestone/base/error.h"
#include "tilestone/base/uuid.h"
#include "tilestone/engine/checkpoint/repair_file_internal.h"
#include "tilestone/engine/checkpoint/verify_plan_internal.h"
#include "tilestone/engine/commit/sibling_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/description_internal.h"
#include "tilestone/engine/open/opening_internal.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/engine/run/progress_internal.h"

namespace tilestone {
namespace engine {
namespace {

constexpr std::string_view kMark = kRepairMark;
constexpr std::string_view kFile = "repair";  // the temporary file

// By file: index into Metadata::files.
using Damages = std::map<uint32_t, std::vector<Damage>>;

// Leaves out damage of index files and damage without a file.
Damages by_file(const std::vector<Damage>& damages, const Metadata& metadata) {
  const auto numbers = files_by_name(metadata);
  Damages found;
  for (const Damage& damage : damages) {
    const auto file = numbers.find(damage.file);
    if (file != numbers.end()) found[file->second].push_back(damage);
  }
  return found;
}

std::set<uint32_t> files_of(const Damages& damages) {
  std::set<uint32_t> files;
  for (const auto& [file, of_file] : damages) files.insert(file);
  return files;
}

// The note that names the temporary file. It is left before the first file is replaced.
class Note {
 public:
  Note(Storage& storage, const std::string& id) : storage_(storage), id_(id) {}
  ~Note() {
    if (exists_) remove_files(storage_, std::vector{note_name(id_)});
  }
  Note(const Note&) = delete;
  Note& operator=(const Note&) = delete;

  void leave() {
    if (exists_) return;
    leave_note(storage_, id_, {}, Deadline::never());
    exists_ = true;
  }
  // Keeps the note, because the temporary file could not be removed.
  void keep() { exists_ = false; }

 private:
  Storage& storage_;
  const std::string id_;
  bool exists_ = false;
};

class Repair {
 public:
  Repair(Storage& storage, const Opened& opened, const std::string& id, const Damages& damages,
         const Deadline& deadline, const ProgressFn& progress)
      : storage_(storage),
        opened_(opened),
        damages_(damages),
        temporary_(temporary_name(id, kFile)),
        deadline_(deadline),
        note_(storage, id),
        maker_(storage, opened, files_of(damages), deadline),
        progress_(progress, "repair", size_of(damages)) {}

  // Returns the repaired damages.
  std::vector<Damage> run() {
    std::vector<Damage> mended;
    for (const auto& [file, of_file] : damages_) {
      static_cast<void>(deadline_.expired());
      std::vector<Damage> gone = mend(file, of_file);
      if (gone.empty()) progress_.add(maker_.written_size(file));
      std::move(gone.begin(), gone.end(), std::back_inserter(mended));
    }
    progress_.finish();
    return mended;
  }

  // After run(): whether some of the damages were gone before, because another repair has mended
  // them since they were found.
  bool found_less() const { return found_less_; }

 private:
  uint64_t size_of(const Damages& damages) const {
    uint64_t bytes = 0;
    for (const auto& [file, of_file] : damages) bytes += maker_.written_size(file);
    return bytes;
  }

  // Replaces the file if that mends something. Returns the repaired damages.
  std::vector<Damage> mend(uint32_t file, const std::vector<Damage>& damages) {
    const std::optional<Remade> made = maker_.make(file);
    if (!made) return {};
    if (!made->changes) {
      const auto remains = [&](const Damage& damage) {
        return damage.item_offset && made->left.contains(*damage.item_offset);
      };
      found_less_ = found_less_ || !std::all_of(damages.begin(), damages.end(), remains);
      return {};
    }
    std::vector<Damage> gone = mended_by(*made, damages);
    if (gone.empty()) return {};
    note_.leave();
    replace(file, made->sections);
    return gone;
  }

  // The damages of one file that the new file no longer has.
  static std::vector<Damage> mended_by(const Remade& made, const std::vector<Damage>& damages) {
    std::vector<Damage> gone;
    for (Damage damage : damages) {
      if (damage.item_offset) {
        const auto from = made.mended_from.find(*damage.item_offset);
        if (from == made.mended_from.end() || made.left.contains(*damage.item_offset)) continue;
        damage.intact_in = from->second;
      }
      gone.push_back(std::move(damage));
    }
    return gone;
  }

  void replace(uint32_t file, const std::vector<Section>& sections) {
    const std::string& name = opened_.metadata.files[file];
    try {
      write(sections, name);
      storage_.rename(temporary_, name, true);
    } catch (...) {
      if (!remove_files(storage_, std::vector{temporary_})) note_.keep();
      throw;
    }
    storage_.settle("");
    maker_.forget(file);
  }

  // Writes the temporary file. `name`: the name that it will get.
  void write(const std::vector<Section>& sections, const std::string& name) {
    uint64_t size = 0;
    for (const Section& section : sections) {
      for (const Stretch& part : section.parts) size += part.size;
    }
    const auto file = storage_.create(temporary_, size);
    if (const auto like = file_like(name)) storage_.copy_permissions(temporary_, *like);
    for (const Section& section : sections) append(section, name, *file);
    file->sync(deadline_);
    file->close();
  }

  // A file whose permissions `name` shall have: itself, or another data file if it is missing.
  std::optional<std::string> file_like(const std::string& name) {
    const auto is_file = [&](const std::string& other) {
      const auto info = stat_for_repair(storage_, other);
      return info && info->regular;
    };
    if (is_file(name)) return name;
    const std::vector<std::string>& files = opened_.metadata.files;
    const auto found = std::find_if(files.begin(), files.end(), is_file);
    return found == files.end() ? std::nullopt : std::optional(*found);
  }

  // FileMaker has already checked these bytes. They are checked again because they are read again
  // here.
  void append(const Section& section, const std::string& name, WritableFile& file) {
    uint32_t crc = 0;
    for (const Stretch& part : section.parts) {
      maker_.each_block(part, [&](ByteView bytes) {
        crc = crc32(bytes, crc);
        file.append(bytes);
        progress_.add(bytes.size());
      });
    }
    if (!section.crc32 || crc == *section.crc32) return;
    Error error(ErrorCode::kIo,
                "the file is not replaced, because its new bytes differ when read a second time: "
                "expected CRC-32 " +
                    std::to_string(*section.crc32) + ", found " + std::to_string(crc));
    if (section.key != nullptr) error.with_key(*section.key);
    throw Error(error).with_file(name);
  }

  Storage& storage_;
  const Opened& opened_;
  const Damages& damages_;
  const std::string temporary_;
  const Deadline deadline_;
  Note note_;
  FileMaker maker_;
  ProgressMeter progress_;  // of writing; a file that stays as it is counts as written
  bool found_less_ = false;
};

// Names of the files of this kind (`what`) that repairs have made.
std::vector<std::string> names_of(Storage& storage, std::string_view what) {
  const std::string end = temporary_name("", what).substr(kTilestoneDirectory.size() + 1);
  std::vector<std::string> names = storage.list_files(std::string(kTilestoneDirectory) + "/");
  std::erase_if(names, [&](const std::string& name) {
    return !name.ends_with(end) || !parse_in_tilestone_directory(name);
  });
  return names;
}

// Removes files of repairs that died; the caller holds the lock. The marks are removed last,
// because the notes are found by them.
void clean_up(Storage& storage) {
  const std::vector<std::string> files = names_of(storage, kFile);
  const std::vector<std::string> marks = names_of(storage, kMark);
  std::vector<std::string> notes;
  for (const auto* names : {&files, &marks}) {
    for (const std::string& name : *names) {
      notes.push_back(note_name(parse_in_tilestone_directory(name)->save_id));
    }
  }
  if (remove_files(storage, files) && remove_files(storage, notes)) remove_files(storage, marks);
}

// A file that exists while a repair holds the location's lock.
class Mark {
 public:
  Mark(Storage& storage, const std::string& id)
      : storage_(storage), name_(temporary_name(id, kMark)) {
    storage_.create(name_)->close();
  }
  ~Mark() { remove_files(storage_, std::vector{name_}); }
  Mark(const Mark&) = delete;
  Mark& operator=(const Mark&) = delete;

 private:
  Storage& storage_;
  const std::string name_;
};

// Whether two descriptions are of the same save.
bool same(const DescribingFiles& a, const DescribingFiles& b) {
  return a.manifest == b.manifest && a.files.contents == b.files.contents;
}

}  // namespace
}  // namespace engine

RepairReport repair(const Location& location, const OpenOptions& options,
                    const ProgressFn& progress) {
  const std::shared_ptr<Storage> storage = engine::followed(location, options.reading).shared();
  const auto find = [&] { return engine::find_checkpoint(storage, options.format); };
  const auto verify = [&] {
    const Checkpoint checkpoint = Checkpoint::open(location, options);
    return checkpoint.with_interrupt(options.interrupt).verify(progress);
  };
  engine::Found found = find();
  RepairReport report;
  report.now = verify();
  // Without damage nothing is written: no directory and no lock.
  if (report.now.ok() || found.description.manifest_file.empty()) return report;

  if (!storage->facts().renames) {
    throw Error(ErrorCode::kUnsupported, "no checkpoint is repaired in " + storage->describe())
        .with_hint("copy it to a directory, repair it there, and copy it back");
  }
  const auto lock = engine::claim_location(*storage);
  if (lock == nullptr) {
    engine::fail_under_way(*storage, "a save", "try again when it has ended");
  }
  engine::clean_up(*storage);
  engine::Found now = find();
  if (!engine::same(found.description, now.description)) report.now = verify();
  {
    const engine::Opened opened =
        engine::open_description(std::move(now.description), now.format.format);
    const engine::Damages damages = engine::by_file(report.now.damages, opened.metadata);
    if (damages.empty() || !opened.has_manifest_file()) return report;
    const std::string id = random_uuid();
    const engine::Mark mark(*storage, id);
    const Deadline deadline = Deadline::never().with_interrupt(options.interrupt);
    engine::Repair repair(*storage, opened, id, damages, deadline, progress);
    report.mended = repair.run();
    if (report.mended.empty() && !repair.found_less()) return report;
  }
  report.now = verify();
  return report;
}

}  // namespace tilestone
