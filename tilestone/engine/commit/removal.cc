// Keys are removed by a save that replaces the checkpoint (transaction.cc), except that its data
// files are those of the replaced one. Its index has a new save id, and so names a new manifest.
// Both describe the checkpoint without the removed keys. Files with fixed names (common.pt,
// metadata.json) stay, so no sibling is needed. For a checkpoint without a manifest, only the index
// is replaced.
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
#include "tilestone/engine/commit/transaction_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/description_internal.h"
#include "tilestone/engine/open/opening_internal.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/megatron_mark.h"
#include "tilestone/format/torch_dist/torch_dist.h"

namespace tilestone {
namespace engine {
namespace {

constexpr auto kPause = std::chrono::milliseconds(50);

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

// What the save `save_id` publishes in the place of the checkpoint.
class Rest {
 public:
  Rest(const Plan& plan, std::string save_id)
      : plan_(plan),
        save_id_(std::move(save_id)),
        keys_(plan.keys.begin(), plan.keys.end()),
        kept_files_(plan.kept.files.begin(), plan.kept.files.end()),
        stays_(kept_files_) {
    // Another writer's index may name them as data files.
    for (const auto& [name, bytes] : plan.opened.files.contents) stays_.insert(name);
  }

  NewIndex made() const {
    Metadata named = plan_.kept;
    if (plan_.opened.manifest) named.save_id = save_id_;
    add_replica_names(named, plan_.opened.replica_names);
    NewIndex made{.index = plan_.opened.format->encode_index(named), .files = stays_};
    if (made.index.size() != 1) throw Error(ErrorCode::kInternal, "an index of several files");
    if (plan_.opened.manifest) made.manifest = make_manifest(made.index.front()).encode();
    return made;
  }

  // The files that the index does not name any more.
  Removal removal(Storage& storage) const {
    Removal removal{plan_.keys, {}, 0, false};
    for (const std::string& name : plan_.opened.metadata.files) {
      if (stays_.contains(name) || in_tilestone_directory(name)) continue;
      const auto info = storage.stat(name);
      if (!info || !info->regular) continue;
      removal.files.push_back(name);
      removal.bytes += info->size;
    }
    std::sort(removal.files.begin(), removal.files.end());
    return removal;
  }

 private:
  Manifest make_manifest(const IndexFile& index) const {
    Manifest made = *plan_.opened.manifest;
    made.save_id = save_id_;
    for (Receipt& receipt : made.receipts) {
      receipt = Without(receipt, keys_, kept_files_).receipt();
      receipt.save_id = save_id_;
    }
    for (IndexSum& sum : made.index) {
      if (sum.name != index.name) continue;
      sum.size = index.bytes.size();
      sum.xxh3 = xxh3_64(index.bytes);
    }
    note_remains(made);
    return made;
  }

  // Adds the files that still contain bytes of removed items to Manifest::remains.
  void note_remains(Manifest& made) const {
    const auto note = [&](const std::string& key, const ItemLocation& at) {
      const std::string& file = plan_.opened.metadata.files[at.file];
      if (keys_.contains(key) && kept_files_.contains(file)) made.remains.insert(file);
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

  const Plan& plan_;
  const std::string save_id_;
  const std::set<std::string> keys_, kept_files_;
  std::set<std::string> stays_;
};

// Removes Megatron-Core's file hashes, which would not match the new .metadata.
void remove_hashes(Storage& storage) {
  const std::string hashes(kMegatronHashes);
  if (!storage.stat(hashes)) return;
  storage.remove(hashes);
  storage.settle("");
  log(LogLevel::kWarning, hashes + " is removed from " + storage.describe() +
                              ": it contains hashes of files that change");
}

// Waits for a save or another removal there.
void begin_waiting(std::optional<Transaction>& transaction, const std::shared_ptr<Storage>& storage,
                   const std::shared_ptr<const Format>& format, const std::string& save_id,
                   const RemovalOptions& options) {
  const auto end = Deadline::after(std::chrono::duration<double>(options.timeout))
                       .with_interrupt(options.interrupt);
  for (;;) {
    transaction.emplace(storage, format, megatron_shards_dialect(), save_id, true);
    try {
      transaction->begin(Deadline::never().with_interrupt(options.interrupt));
      break;
    } catch (const Error& error) {
      transaction->abandon(true);
      if (error.reason() != Reason::kUnderWay || end.expired()) throw;
    }
    std::this_thread::sleep_for(kPause);
  }
  if (transaction->holds_claim()) return;
  transaction->abandon(true);
  throw Error(ErrorCode::kUnsupported,
              "no keys can be removed at " + storage->describe() + ", which can't be locked");
}

// nullopt: another caller has removed the keys.
std::optional<Removal> remove_under(Transaction& transaction,
                                    const std::shared_ptr<Storage>& storage,
                                    const std::string& save_id, std::string_view prefix) {
  if (storage->facts().put_if_tag) {
    const Standing here = look_at(*storage, torch_dist_format());
    finish_index(*storage, here, read_existing(*storage, here).save_id);
  }
  const Plan plan = plan_removal(storage, prefix);
  if (plan.keys.empty()) return std::nullopt;
  const Rest rest(plan, save_id);
  remove_hashes(*storage);
  transaction.prepare_made(rest.made(), {}, {}, 1, Deadline::never());
  Removal removal = rest.removal(*storage);
  transaction.commit(Deadline::never());
  return removal;
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
  const engine::Plan plan = engine::plan_removal(storage, prefix);
  if (plan.keys.empty()) return {};
  const std::string save_id = random_uuid();
  std::optional<engine::Transaction> transaction;
  engine::begin_waiting(transaction, storage, plan.opened.format, save_id, options);
  try {
    auto removal = engine::remove_under(*transaction, storage, save_id, prefix);
    if (removal) {
      transaction->clean();
      return *std::move(removal);
    }
  } catch (...) {
    if (!transaction->was_tried()) transaction->abandon(true);
    throw;
  }
  transaction->abandon(true);
  return {{}, {}, 0, true};
}

}  // namespace tilestone
