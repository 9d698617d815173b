#include "tilestone/engine/save/planned_internal.h"

#include <map>
#include <set>
#include <string>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/size_text.h"
#include "tilestone/engine/commit/sibling_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/run/inventory.h"
#include "tilestone/engine/run/resources_internal.h"
#include "tilestone/engine/write/writer_internal.h"
#include "tilestone/format/archive/torch_archive.h"
#include "tilestone/state/value_children.h"

namespace tilestone::engine {
namespace {

// Below this, starting threads does not pay off.
constexpr uint64_t kMinBytesForThreads = 16u << 20;

// The files to which the format gives names.
std::set<std::string> named_files(const SaveShare& share) {
  std::set<std::string> names;
  const auto add = [&](std::optional<std::string> name) {
    if (name) names.insert(*std::move(name));
  };
  for (const TensorItem& item : share.items.tensors) {
    for (const Piece& piece : item.pieces) {
      if (piece.box.numel() > 0) add(share.format->separate_file(item, piece));
    }
  }
  for (const ObjectItem& item : share.items.objects) add(share.format->separate_file(item));
  return names;
}

}  // namespace

std::shared_ptr<ThreadPool> staging_threads(uint64_t bytes, int option, SessionParts* session) {
  const size_t count = thread_count(option);
  if (bytes < kMinBytesForThreads || count == 1) return nullptr;
  if (session != nullptr) return session->resources.threads(count);
  return std::make_shared<ThreadPool>(count);
}

std::shared_ptr<StagingMemory> stage_share(PlannedShare& planned, SessionParts* session,
                                           Deadline deadline,
                                           const std::shared_ptr<LazyStaging>& lazy) {
  SaveShare& share = planned.share;
  const uint64_t bytes = staging_bytes(share.items, share.local, share.assignment);
  const auto threads = staging_threads(bytes, share.options.resources.threads, session);
  auto memory = session != nullptr ? session->lend_memory() : std::make_shared<StagingMemory>();
  memory->reserve(bytes, nullptr);
  StagedLater late =
      stage_tensors(share.items, share.local, share.assignment, *memory, threads.get(), deadline,
                    lazy != nullptr ? lazy->watch() : nullptr);
  for (const auto* objects : {&share.assignment.objects, &share.assignment.object_copies}) {
    for (const uint32_t i : *objects) {
      Value& value = share.items.objects[i].value;
      // With its tensors, as the archive that is written. Nothing else of it changes.
      if (holds_tensors(value)) value = Pickled{write_torch_archive(value), true, true};
    }
  }
  if (share.items.common && holds_tensors(*share.items.common)) {
    share.items.common = read_torch_archive(write_torch_archive(*share.items.common));
  }
  if (lazy != nullptr) {
    lazy->begin(std::move(late), memory, threads);
    planned.lazy = lazy;
  }
  return memory;
}

void open_storage(PlannedShare& planned, const Deadline& deadline) {
  if (!planned.sibling.empty()) {
    planned.storage = sibling_storage(*planned.location, planned.sibling);
    return;
  }
  planned.storage = planned.location;
  if (!planned.transaction) expect_begun_here(*planned.storage, planned.share.save_id, deadline);
}

Receipt write_assigned(PlannedShare& planned, KeptResources* kept, Deadline deadline,
                       int first_file) {
  const SaveShare& share = planned.share;
  if (planned.storage == nullptr) open_storage(planned, deadline);
  const bool describes = planned.transaction || (planned.hosts != nullptr && share.rank == 0);
  if (describes && !planned.of_dialect) {
    planned.of_dialect = share.dialect->encode_index(share.items, *share.format);
  }
  if (planned.lazy != nullptr) planned.lazy->read(deadline);
  WriteTask task{&share.items, &share.local,     share.assignment, share.list_held,
                 share.rank,   share.world_size, share.save_id,    first_file};
  task.kept = kept;
  if (share.one_writer && share.format->has_fixed_names()) {
    planned.transaction->note_files(named_files(share), deadline);
    task.discard = [&](std::span<const std::string> files) { planned.transaction->discard(files); };
  }
  Receipt receipt = write_items(*planned.storage, *share.format, task, share.options, deadline);
  planned.result.items_written = receipt.chunks.size() + receipt.objects.size();
  for (const ReceiptFile& file : receipt.files) {
    if (file.steps <= 1) planned.result.bytes_written += file.size;
    planned.written.push_back(file.name);
  }
  for (const auto* chunks : {&receipt.chunks, &receipt.copies}) {
    for (const Receipt::Chunk& chunk : *chunks) {
      const bool is_shared = receipt.files[chunk.at.file].steps > 1;
      if (is_shared) planned.result.bytes_shared += chunk.at.length;
    }
  }
  if (planned.lazy != nullptr) planned.lazy->expect_sealed(deadline);
  return receipt;
}

Receipt write_share(PlannedShare& planned, KeptResources* kept, Deadline deadline, int first_file) {
  const auto began = StepTimes::Clock::now();
  Receipt receipt = write_assigned(planned, kept, deadline, first_file);
  planned.steps.add("writing", began);
  // By files the same state under the same token gives the same bytes, whenever it is written.
  if (!planned.share.options.by_files) receipt.steps = planned.steps.reported();
  return receipt;
}

void note_planned(PlannedShare& planned, StepTimes::Clock::time_point began, double preparing) {
  const SaveShare& share = planned.share;
  planned.steps.set_name("save " + share.save_id + ", rank " + std::to_string(share.rank));
  planned.steps.add_earlier("preparing", preparing);
  planned.steps.add("planning", began);
}

void note_published(PlannedShare& planned, StepTimes::Clock::time_point began, SaveResult& result) {
  planned.steps.add("publishing", began);
  result.timings = planned.steps.all();
  const SaveShare& share = planned.share;
  const bool coordinator = share.rank == 0;
  const bool knows_all = planned.bytes_of_ranks > 0;
  const std::string by =
      knows_all || share.world_size == 1
          ? "on " + counted(static_cast<uint64_t>(share.world_size), "rank")
          : "by rank " + std::to_string(share.rank) + " of " + std::to_string(share.world_size);
  const std::string done = result.published ? "saved " : "written, not yet published: ";
  const std::string where = planned.location->describe();
  log_ended(planned.steps, done + (planned.hosts != nullptr ? where + " on the hosts" : where),
            knows_all ? planned.bytes_of_ranks : result.bytes_written, by, coordinator);
}

void release_tensors(SaveShare& share) {
  for (TensorItem& item : share.items.tensors) {
    for (Piece& piece : item.pieces) {
      piece.data = TensorView::without_data(piece.data.dtype, piece.data.shape);
    }
  }
}

namespace {

std::map<std::string, std::string> all_attributes(const SaveOptions& options) {
  std::map<std::string, std::string> all = options.attributes;
  if (options.step == nullptr) return all;
  for (const auto& [name, value] : options.step->attributes) all.insert_or_assign(name, value);
  return all;
}

}  // namespace

SaveToIndex save_to_index(PlannedShare& planned, std::vector<Receipt> receipts,
                          std::span<const Bytes> encoded) {
  const SaveShare& share = planned.share;
  for (const Receipt& receipt : receipts) {
    for (const ReceiptFile& file : receipt.files) {
      if (file.steps <= 1) planned.bytes_of_ranks += file.size;
    }
  }
  return {.receipts = std::move(receipts),
          .encoded = encoded,
          .attributes = all_attributes(share.options),
          .of_dialect = std::exchange(planned.of_dialect, std::nullopt).value(),
          .replicas = std::move(planned.replicas),
          .common = share.items.common ? &*share.items.common : nullptr};
}

void prepare_commit(PlannedShare& planned, std::vector<Receipt> receipts,
                    std::span<const Bytes> encoded, Deadline deadline) {
  const SaveOptions& options = planned.share.options;
  planned.transaction->prepare({.save = save_to_index(planned, std::move(receipts), encoded),
                                .threads = options.resources.threads,
                                .step = options.step},
                               deadline);
}

void discard(PlannedShare& planned, bool none_writes) noexcept {
  if (planned.transaction && planned.transaction->was_tried()) return;
  if (planned.transaction) {
    planned.transaction->discard(planned.written);
    planned.transaction->abandon(none_writes || planned.share.world_size == 1);
  } else if (!planned.written.empty()) {
    remove_files(*planned.storage, planned.written);
  }
}

}  // namespace tilestone::engine
