// First the checkpoint is verified, and only where something is damaged files are made. Then, one
// file after another:
//
//  1. The lock of the location, a mark that says what holds it, and a note that speaks of the
//     temporary file.
//  2. The new file under a temporary name, durable, with the checksums of what its save wrote.
//  3. Its rename over the damaged one, made durable.
//
// Then note and mark go. A crash before 3 leaves the old file, and a temporary one and a mark,
// which the next repair that finds damage, save or gc removes by their names.
#include "tilestone/engine/repair.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "tilestone/base/checksum.h"
#include "tilestone/base/deadline.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/commit/staging_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/opening_internal.h"
#include "tilestone/engine/repair_file_internal.h"

namespace tilestone {
namespace engine {
namespace {

constexpr std::string_view kMark = "repairing";
constexpr std::string_view kFile = "repair";  // the temporary one

// By file of the checkpoint (index into Metadata::files).
using Damages = std::map<uint32_t, std::vector<Damage>>;

// Without those of the index, or of no file.
Damages by_file(const std::vector<Damage>& damages, const Metadata& metadata) {
  std::unordered_map<std::string_view, uint32_t> numbers;
  for (uint32_t i = 0; i < metadata.files.size(); ++i) numbers.emplace(metadata.files[i], i);
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

// The note that speaks of the temporary file: there from the first one on.
class Note {
 public:
  Note(Storage& storage, const std::string& id) : storage_(storage), id_(id) {}
  ~Note() {
    if (stands_) remove_files(storage_, std::vector{note_name(id_)});
  }
  Note(const Note&) = delete;
  Note& operator=(const Note&) = delete;

  void leave() {
    if (stands_) return;
    leave_note(storage_, id_, {}, Deadline::never());
    stands_ = true;
  }
  // The temporary file could not be removed.
  void keep() { stands_ = false; }

 private:
  Storage& storage_;
  const std::string id_;
  bool stands_ = false;
};

class Repair {
 public:
  Repair(Storage& storage, const Opened& opened, const std::string& id, const Damages& damages,
         const Deadline& deadline)
      : storage_(storage),
        opened_(opened),
        damages_(damages),
        temporary_(temporary_name(id, kFile)),
        deadline_(deadline),
        note_(storage, id),
        maker_(storage, opened, files_of(damages), deadline) {}

  // Returns the damages that it has mended.
  std::vector<Damage> run() {
    std::vector<Damage> mended;
    for (const auto& [file, of_file] : damages_) {
      static_cast<void>(deadline_.expired());
      const std::optional<Remade> made = maker_.make(file);
      if (!made) continue;
      std::vector<Damage> gone = mended_by(*made, of_file);
      if (gone.empty()) continue;
      note_.leave();
      replace(file, made->sections);
      std::move(gone.begin(), gone.end(), std::back_inserter(mended));
    }
    return mended;
  }

 private:
  // Those of the damages, all of one file, that are not there in the new one.
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
    storage_.sync_directory("");
    maker_.forget(file);
  }

  // `name`: the file's in the checkpoint.
  void write(const std::vector<Section>& sections, const std::string& name) {
    uint64_t size = 0;
    for (const Section& section : sections) {
      for (const Stretch& part : section.parts) size += part.size;
    }
    const auto file = storage_.create(temporary_, size);
    for (const Section& section : sections) append(section, name, *file);
    file->sync(deadline_);
    file->close();
  }

  // Its bytes were right when they were looked at, and are read once more here.
  void append(const Section& section, const std::string& name, WritableFile& file) {
    uint32_t crc = 0;
    for (const Stretch& part : section.parts) {
      maker_.each_piece(part, [&](ByteView bytes) {
        crc = crc32(bytes, crc);
        file.append(bytes);
      });
    }
    if (!section.crc32 || crc == *section.crc32) return;
    Error error(ErrorCode::kIo,
                "the file is not written anew: bytes for it were read a second time, and differ: "
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
};

// Temporary files of repairs, of this kind.
std::vector<std::string> names_of(Storage& storage, std::string_view what) {
  const std::string end = temporary_name("", what).substr(kOwnDirectory.size() + 1);
  std::vector<std::string> names = storage.list_files(std::string(kOwnDirectory) + "/");
  std::erase_if(names, [&](const std::string& name) {
    return !name.ends_with(end) || !parse_in_own_directory(name);
  });
  return names;
}

// Of repairs that died: nobody else holds the lock. The mark goes last, by which the note is found.
void clean_up(Storage& storage) {
  const std::vector<std::string> files = names_of(storage, kFile);
  const std::vector<std::string> marks = names_of(storage, kMark);
  std::vector<std::string> notes;
  for (const auto* names : {&files, &marks}) {
    for (const std::string& name : *names) {
      notes.push_back(note_name(parse_in_own_directory(name)->save_id));
    }
  }
  if (remove_files(storage, files) && remove_files(storage, notes)) remove_files(storage, marks);
}

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

  static bool stands(Storage& storage) { return !names_of(storage, kMark).empty(); }

 private:
  Storage& storage_;
  const std::string name_;
};

// What describes the checkpoint that stands there, as far as it differs from save to save.
bool same(const Description& a, const Description& b) {
  return a.manifest == b.manifest && a.files.contents == b.files.contents;
}

}  // namespace
}  // namespace engine

RepairReport repair(const Location& location, const OpenOptions& options,
                    const ProgressFn& progress) {
  const std::shared_ptr<Storage>& storage = location.shared();
  const auto find = [&] { return engine::find_checkpoint(storage, options.format); };
  const auto verify = [&] {
    const Checkpoint checkpoint = Checkpoint::open(location, options);
    return checkpoint.with_interrupt(options.interrupt).verify(progress);
  };
  engine::Found found = find();
  RepairReport report;
  report.now = verify();
  // Where nothing is to be written, nothing is: no directory and no lock either.
  if (report.now.ok() || found.description.manifest.empty()) return report;

  const auto lock = engine::try_lock_location(*storage);
  if (lock == nullptr) {
    engine::fail_under_way(*storage, engine::Mark::stands(*storage) ? "a repair" : "a save");
  }
  engine::clean_up(*storage);
  engine::Found now = find();
  if (!engine::same(found.description, now.description)) report.now = verify();
  {
    const engine::Opened opened =
        engine::open_description(std::move(now.description), now.format.format);
    const engine::Damages damages = engine::by_file(report.now.damages, opened.metadata);
    if (damages.empty() || !opened.manifest) return report;
    const std::string id = engine::random_save_id();
    const engine::Mark mark(*storage, id);
    const Deadline deadline = Deadline::never().with_interrupt(options.interrupt);
    report.mended = engine::Repair(*storage, opened, id, damages, deadline).run();
  }
  if (!report.mended.empty()) report.now = verify();
  return report;
}

}  // namespace tilestone
