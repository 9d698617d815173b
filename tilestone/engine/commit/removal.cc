// The new index has a new save id, and so names a new manifest. Both describe the existing
// checkpoint without the removed keys. As in a save (transaction.cc), one rename switches both:
//
//  1. Claim the location; where there are tags, take that of the index, and read it then. Leave a
//     note that this removal has begun and which saves' files it replaces. The note is durable
//     before anything else is done.
//  2. Publish the new manifest under its own name.
//  3. Put the new index over the old one, where there are tags if it still has the one taken. The
//     put is the commit.
//  4. Remove the data files that the new index does not name, the old manifest, and then the note.
//
// A crash before step 3 leaves the old checkpoint, and a note and a manifest that the next save or
// gc removes. A crash after it leaves the new checkpoint, and files that are leftovers according to
// the note. For a checkpoint without a manifest, only the index is replaced, by the same rename.
#include "tilestone/engine/commit/removal.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/base/uuid.h"
#include "tilestone/engine/commit/old_checkpoint_internal.h"
#include "tilestone/engine/commit/staging_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/description_internal.h"
#include "tilestone/engine/open/opening_internal.h"
#include "tilestone/format/megatron_mark.h"
#include "tilestone/format/torch_dist/torch_dist.h"

namespace tilestone {
namespace engine {
namespace {

constexpr auto kPause = std::chrono::milliseconds(10);

// An existing checkpoint, and what a removal keeps of it.
struct Plan {
  Opened opened;
  Metadata kept;
  std::vector<std::string> keys;  // to be removed
};

Opened open_standing(const std::shared_ptr<Storage>& storage) {
  Found found = find_checkpoint(storage, nullptr);
  return open_description(std::move(found.description), nullptr, SecondNames::kAsStored);
}

void expect_possible(const Opened& opened, const Storage& storage) {
  const bool one_file = !opened.format->has_fixed_names() && !opened.metadata.rank_local;
  if (!opened.dialect->can_lose_keys() || !one_file) {
    throw Error(ErrorCode::kUnsupported,
                "keys can be removed only from checkpoints of Megatron-Core in the format "
                "torch_dist; the checkpoint at " +
                    storage.describe() + " has the format " + std::string(opened.format->name()) +
                    " and the dialect " + std::string(opened.dialect->name()))
        .with_hint("load the tensors and objects to keep, and save them");
  }
  const auto& files = opened.metadata.files;
  const bool ours = std::any_of(files.begin(), files.end(), is_own_name);
  if (!ours || opened.manifest) return;
  throw Error(ErrorCode::kCorrupt,
              "the manifest of the save \"" + opened.metadata.save_id + "\" is missing");
}

// Refuses tensors of which one item has several chunks: today's index can't describe them.
void expect_writable(const Metadata& kept) {
  for (const StoredTensor& tensor : kept.tensors) {
    for (const StoredChunk& chunk : tensor.chunks) {
      if (!chunk.flat) continue;
      throw Error(
          ErrorCode::kUnsupported,
          "a flattened tensor of Megatron-Core up to 0.15 would remain, and an index with such "
          "tensors can't be written")
          .with_key(tensor.key)
          .with_hint("load the tensors and objects to keep, and save them");
    }
  }
}

// Keeps only the files that contain items.
void drop_unused_files(Metadata& metadata) {
  constexpr uint32_t kUnused = ~uint32_t{0};
  std::vector<uint32_t> numbers(metadata.files.size(), kUnused);
  std::vector<std::string> used;
  const auto move_to = [&](ItemLocation& at) {
    uint32_t& number = numbers[at.file];
    if (number == kUnused) {
      number = static_cast<uint32_t>(used.size());
      used.push_back(metadata.files[at.file]);
    }
    at.file = number;
  };
  for (StoredTensor& tensor : metadata.tensors) {
    for (StoredChunk& chunk : tensor.chunks) move_to(chunk.at);
  }
  for (StoredObject& object : metadata.objects) move_to(object.at);
  metadata.files = std::move(used);
}

Plan plan_removal(const std::shared_ptr<Storage>& storage, std::string_view prefix) {
  Plan plan{open_standing(storage), {}, {}};
  expect_possible(plan.opened, *storage);
  plan.kept = plan.opened.metadata;
  const auto goes = [&](const auto& item) {
    const bool gone = item.key.starts_with(prefix);
    if (gone) plan.keys.push_back(item.key);
    return gone;
  };
  std::erase_if(plan.kept.tensors, goes);
  std::erase_if(plan.kept.objects, goes);
  if (plan.keys.empty()) return plan;
  std::sort(plan.keys.begin(), plan.keys.end());
  if (plan.opened.common) plan.kept.objects.push_back(*plan.opened.common);
  expect_writable(plan.kept);
  drop_unused_files(plan.kept);
  plan.kept.index();
  return plan;
}

// One rank's receipt without the removed keys, as if the rank had never written them.
class Without {
 public:
  Without(const Receipt& receipt, const std::set<std::string>& keys,
          const std::set<std::string>& kept_files)
      : receipt_(receipt), keys_(keys) {
    left_.rank = receipt.rank;
    left_.world_size = receipt.world_size;
    left_.save_id = receipt.save_id;
    left_.host = receipt.host;
    left_.dict_keys = receipt.dict_keys;
    for (const ReceiptFile& file : receipt.files) {
      files_.push_back(number_of(left_.files, file, kept_files.contains(file.name)));
    }
    for (const Receipt::Tensor& tensor : receipt.tensors) {
      tensors_.push_back(number_of(left_.tensors, tensor, !keys.contains(tensor.key)));
    }
  }

  Receipt receipt() && {
    keep_chunks(receipt_.chunks, left_.chunks);
    keep_chunks(receipt_.copies, left_.copies);
    keep_objects(receipt_.objects, left_.objects);
    keep_objects(receipt_.object_copies, left_.object_copies);
    for (Receipt::FilePart part : receipt_.parts) {
      if (!files_[part.file]) continue;
      part.file = *files_[part.file];
      left_.parts.push_back(part);
    }
    for (const auto& [tensor, attributes] : receipt_.attributes) {
      if (tensors_[tensor]) left_.attributes.emplace(*tensors_[tensor], attributes);
    }
    return std::move(left_);
  }

 private:
  using Number = std::optional<uint32_t>;  // the new number; nullopt if removed

  template <typename T>
  static Number number_of(std::vector<T>& kept, const T& item, bool stays) {
    if (!stays) return std::nullopt;
    kept.push_back(item);
    return static_cast<uint32_t>(kept.size() - 1);
  }

  // Also drops copies in files that are removed because they contain nothing else that is kept.
  void keep_chunks(const std::vector<Receipt::Chunk>& from,
                   std::vector<Receipt::Chunk>& kept) const {
    for (Receipt::Chunk chunk : from) {
      if (!tensors_[chunk.tensor] || !files_[chunk.at.file]) continue;
      chunk.tensor = *tensors_[chunk.tensor];
      chunk.at.file = *files_[chunk.at.file];
      kept.push_back(std::move(chunk));
    }
  }

  void keep_objects(const std::vector<Receipt::Object>& from,
                    std::vector<Receipt::Object>& kept) const {
    for (Receipt::Object object : from) {
      if (keys_.contains(object.key) || !files_[object.at.file]) continue;
      object.at.file = *files_[object.at.file];
      kept.push_back(std::move(object));
    }
  }

  const Receipt& receipt_;
  const std::set<std::string>& keys_;
  std::vector<Number> files_, tensors_;  // by their number in the old receipt
  Receipt left_;
};

class Remover {
 public:
  // `standing`: what was at the name of the index before the plan was made.
  Remover(Storage& storage, Plan plan, Condition standing, StorageClaim& lock)
      : storage_(storage), plan_(std::move(plan)), standing_(std::move(standing)), lock_(lock) {
    const auto& files = plan_.kept.files;
    kept_files_.insert(files.begin(), files.end());
  }

  Removal run() {
    storage_.settle("");  // the old index must be durable, so that no crash can undo it
    remove_hashes();
    if (plan_.opened.manifest) leave_note(storage_, save_id_, replaced_saves(), Deadline::never());
    try {
      make_index();
    } catch (...) {
      roll_back();
      throw;
    }
    const Deadline limit = lock_.held_until(Deadline::never());
    if (limit.expired()) {  // others may have removed what was made
      roll_back();
      fail_under_way(storage_, "a save", "try again when it has ended");
    }
    // If this fails, nobody can know which index will be there after a reboot: remove nothing.
    if (!storage_.put(index_.name, index_.bytes, standing_, temporary_name(save_id_, "metadata"),
                      limit)) {
      roll_back();
      fail_under_way(storage_, "a save", "try again when it has ended");
    }
    Removal removal{std::move(plan_.keys), {}, 0, false};
    clean(removal);
    return removal;
  }

 private:
  // Removes Megatron-Core's file hashes, which would not match the new .metadata.
  void remove_hashes() {
    const std::string hashes(kMegatronHashes);
    if (!storage_.stat(hashes)) return;
    storage_.remove(hashes);
    storage_.settle("");
    log(LogLevel::kWarning, hashes + " is removed from " + storage_.describe() +
                                ": it contains hashes of files that change");
  }

  // The saves whose ids are in the names of the checkpoint's files, as a note names them.
  std::set<std::string> replaced_saves() const {
    std::set<std::string> saves{plan_.opened.metadata.save_id};
    for (const std::string& name : plan_.opened.metadata.files) {
      if (const auto own = parse_tilestone_name(name)) saves.insert(own->noted);
    }
    return saves;
  }

  // Makes the new index without publishing it, and publishes the manifest that it names.
  void make_index() {
    if (plan_.opened.manifest) plan_.kept.save_id = save_id_;
    Metadata named = plan_.kept;
    add_replica_names(named, plan_.opened.replica_names);
    Index index = plan_.opened.format->encode_index(named);
    if (index.size() != 1) throw Error(ErrorCode::kInternal, "an index of several files");
    index_ = std::move(index.front());
    if (!plan_.opened.manifest) return;
    storage_.publish(manifest_name(save_id_), temporary_name(save_id_, "manifest"),
                     make_manifest().encode(), false, Deadline::never());
  }

  Manifest make_manifest() const {
    const Manifest& old = *plan_.opened.manifest;
    Manifest made = old;
    const std::set<std::string> keys(plan_.keys.begin(), plan_.keys.end());
    made.save_id = save_id_;
    made.receipts.clear();
    for (const Receipt& receipt : old.receipts) {
      made.receipts.push_back(Without(receipt, keys, kept_files_).receipt());
      made.receipts.back().save_id = save_id_;
    }
    for (IndexSum& sum : made.index) {
      if (sum.name != index_.name) continue;
      sum.size = index_.bytes.size();
      sum.xxh3 = xxh3_64(index_.bytes);
    }
    note_remains(made, keys);
    return made;
  }

  // Adds the files that still contain bytes of removed items to Manifest::remains.
  void note_remains(Manifest& made, const std::set<std::string>& keys) const {
    const auto note = [&](const std::string& key, const ItemLocation& at) {
      const std::string& file = plan_.opened.metadata.files[at.file];
      if (keys.contains(key) && kept_files_.contains(file)) made.remains.insert(file);
    };
    for (const StoredTensor& tensor : plan_.opened.metadata.tensors) {
      for (const StoredChunk& chunk : tensor.chunks) note(tensor.key, chunk.at);
    }
    for (const StoredCopy& copy : plan_.opened.metadata.copies) {
      note(plan_.opened.metadata.tensors[copy.tensor].key, copy.at);
    }
    for (const StoredObject& object : plan_.opened.metadata.objects) {
      note(object.key, object.at);
      for (const ItemLocation& copy : object.copies) note(object.key, copy);
      for (const ItemLocation& copy : object.unlike) note(object.key, copy);
    }
    std::erase_if(made.remains, [&](const auto& file) { return !kept_files_.contains(file); });
  }

  void roll_back() {
    if (!plan_.opened.manifest) return;
    if (remove_files(storage_, std::vector{manifest_name(save_id_)})) {
      remove_files(storage_, std::vector{note_name(save_id_)});
    }
  }

  void clean(Removal& removal) {
    try {
      for (const std::string& name : plan_.opened.metadata.files) {
        if (kept_files_.contains(name) || !may_go(name)) continue;
        const auto info = storage_.stat(name);
        if (!info || !info->regular) continue;
        removal.files.push_back(name);
        removal.bytes += info->size;
      }
      std::sort(removal.files.begin(), removal.files.end());
      // The manifest goes first: a process that reads the old checkpoint then knows that a missing
      // file was not lost.
      const auto& manifest = plan_.opened.manifest;
      std::vector<std::string> gone = removal.files;
      if (manifest) gone.insert(gone.begin(), manifest_name(manifest->save_id));
      if (!remove_files(storage_, gone)) return;  // the note is needed for the files that stay
      storage_.settle("");
      if (manifest) remove_files(storage_, std::vector{note_name(save_id_)});
    } catch (const Error& error) {
      log(LogLevel::kWarning, std::string("files of removed keys stay: ") + error.what());
    }
  }

  // The names may come from another writer's index: never remove files of kTilestoneDirectory or
  // files that describe the checkpoint.
  bool may_go(const std::string& name) const {
    const bool in_tilestone_directory = name.starts_with(std::string(kTilestoneDirectory) + "/");
    return !in_tilestone_directory && !plan_.opened.files.contents.contains(name);
  }

  Storage& storage_;
  Plan plan_;
  const Condition standing_;
  StorageClaim& lock_;
  const std::string save_id_ = random_uuid();
  std::set<std::string> kept_files_;
  IndexFile index_;
};

// What must hold when the index is put: it still has the tag that it has now, where there are tags.
Condition index_of(Storage& storage, const Plan& plan) {
  for (const std::string& name : plan.opened.format->index_files(plan.opened.files.names)) {
    const auto info = storage.stat(name);
    if (info && !info->tag.empty()) return Condition::has(info->tag);
  }
  return Condition::always();
}

std::unique_ptr<StorageClaim> wait_for_lock(Storage& storage, const RemovalOptions& options) {
  const auto end = Deadline::after(std::chrono::duration<double>(options.timeout))
                       .with_interrupt(options.interrupt);
  while (true) {
    if (auto lock = claim_location(storage, end)) return lock;
    if (end.expired()) fail_under_way(storage, "a save");
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace
}  // namespace engine

Removal remove_keys(const Location& location, std::string_view prefix,
                    const RemovalOptions& options) {
  if (prefix.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "an empty prefix would remove all tensors and objects");
  }
  const std::shared_ptr<Storage>& storage = location.shared();
  // The lock file is made only if there are keys to remove.
  engine::Plan plan = engine::plan_removal(storage, prefix);
  if (plan.keys.empty()) return {};
  const auto lock = engine::wait_for_lock(*storage, options);
  if (storage->facts().put_if_tag) {
    const engine::Standing here = engine::look_at(*storage, torch_dist_format());
    engine::finish_index(*storage, here, engine::read_existing(*storage, here).save_id);
  }
  const Condition standing = engine::index_of(*storage, plan);
  plan = engine::plan_removal(storage, prefix);
  if (plan.keys.empty()) return {{}, {}, 0, true};
  return engine::Remover(*storage, std::move(plan), standing, *lock).run();
}

}  // namespace tilestone
