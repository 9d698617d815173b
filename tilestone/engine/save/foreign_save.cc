#include "tilestone/engine/save/foreign_save.h"

#include <unistd.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/commit/sibling_internal.h"
#include "tilestone/engine/commit/transaction_internal.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/engine/write/writer_internal.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/torch_dist/torch_dist.h"
#include "tilestone/plan/receipt.h"

namespace tilestone {
namespace {

constexpr const char* kIndexName = ".metadata";

void check_chunk(const ForeignChunk& chunk) {
  const auto refuse = [&](const std::string& problem) {
    throw Error(ErrorCode::kInvalidArgument, problem).with_key(chunk.key);
  };
  if (chunk.data.shape != chunk.box.shape) {
    refuse("the planner gave data of shape " + to_string(chunk.data.shape) +
           " for a chunk of shape " + to_string(chunk.box.shape));
  }
  if (!chunk.data.has_data() && !chunk.box.empty()) refuse("a chunk without data can't be saved");
  if (!Box::whole(chunk.global_shape).contains(chunk.box)) {
    refuse("the chunk " + to_string(chunk.box) + " is outside the tensor of shape " +
           to_string(chunk.global_shape));
  }
}

// A share as items, and the place of each of its chunks among the pieces of all items.
struct ShareItems {
  Items items;
  LocalSavePlan plan;
  Assignment assignment;
  std::vector<size_t> order;  // order[i]: the share's chunk that is chunk i of the plan
};

// The pieces of one tensor are together in one item.
void add_chunks(const ForeignShare& share, ShareItems& made) {
  std::unordered_map<std::string_view, size_t> known;
  std::vector<std::vector<size_t>> chunks;  // of each item
  for (size_t i = 0; i < share.chunks.size(); ++i) {
    const ForeignChunk& chunk = share.chunks[i];
    check_chunk(chunk);
    const auto [found, is_new] = known.try_emplace(chunk.key, chunks.size());
    if (is_new) {
      TensorItem& item = made.items.tensors.emplace_back();
      item.key = chunk.key;
      item.dtype = chunk.data.dtype;
      item.global_shape = chunk.global_shape;
      chunks.emplace_back();
    }
    TensorItem& item = made.items.tensors[found->second];
    if (item.dtype != chunk.data.dtype || item.global_shape != chunk.global_shape) {
      throw Error(ErrorCode::kInvalidArgument,
                  "the planner gave chunks of one tensor with different dtypes or global shapes")
          .with_key(chunk.key);
    }
    item.pieces.push_back({chunk.box, chunk.data});
    chunks[found->second].push_back(i);
  }
  for (const std::vector<size_t>& of_item : chunks) {
    made.order.insert(made.order.end(), of_item.begin(), of_item.end());
  }
}

ShareItems items_of(const ForeignShare& share) {
  ShareItems made;
  add_chunks(share, made);
  for (const ForeignBytes& each : share.encoded) {
    ObjectItem& item = made.items.objects.emplace_back();
    item.key = each.key;
    item.value = Pickled{each.bytes, true};
  }
  made.plan.chunks.resize(share.chunks.size());
  made.plan.objects.resize(share.encoded.size());
  for (uint32_t i = 0; i < share.chunks.size(); ++i) made.assignment.chunks.push_back(i);
  for (uint32_t i = 0; i < share.encoded.size(); ++i) made.assignment.objects.push_back(i);
  return made;
}

ForeignPlace place_of(const Receipt& receipt, const ReceiptItem& at) {
  return {receipt.files.at(at.file).name, at.offset, at.length};
}

// Reports the transformed chunks, which were written as objects, as what they are.
void move_chunks(const ForeignShare& share, Receipt& receipt) {
  std::vector<Receipt::Object> objects;
  for (size_t i = 0; i < share.encoded.size(); ++i) {
    const auto& chunk = share.encoded[i].chunk;
    if (!chunk) {
      objects.push_back(std::move(receipt.objects[i]));
      continue;
    }
    const auto tensor = static_cast<uint32_t>(receipt.tensors.size());
    receipt.tensors.push_back({share.encoded[i].key, {}, chunk->dtype, chunk->global_shape});
    receipt.chunks.push_back({tensor, chunk->box, receipt.objects[i].at});
  }
  receipt.objects = std::move(objects);
}

// The files that write_foreign() has made.
std::vector<std::string> files_of(const std::vector<Receipt>& receipts,
                                  const std::string& save_id) {
  std::vector<std::string> names;
  for (const Receipt& receipt : receipts) {
    for (const ReceiptFile& file : receipt.files) {
      if (file.name.starts_with(save_id)) names.push_back(file.name);
    }
  }
  return names;
}

std::vector<Receipt> receipts_of(std::span<const Bytes> encoded, int world_size,
                                 const std::string& save_id) {
  std::vector<Receipt> receipts(static_cast<size_t>(world_size));
  for (size_t rank = 0; rank < receipts.size(); ++rank) {
    receipts[rank].rank = static_cast<int>(rank);
    receipts[rank].world_size = world_size;
    receipts[rank].save_id = save_id;
  }
  for (const Bytes& one : encoded) {
    Receipt receipt = Receipt::decode(one);
    if (receipt.save_id != save_id || receipt.world_size != world_size || receipt.rank < 0 ||
        receipt.rank >= world_size) {
      throw Error(ErrorCode::kInvalidArgument, "a receipt of rank " + std::to_string(receipt.rank) +
                                                   " of " + std::to_string(receipt.world_size) +
                                                   " belongs to the save " + receipt.save_id +
                                                   ", but this is the save " + save_id + " of " +
                                                   std::to_string(world_size) + " ranks")
          .with_rank(receipt.rank);
    }
    Receipt& all = receipts[static_cast<size_t>(receipt.rank)];
    all.host = receipt.host;
    all = joined_receipts(std::move(all), std::move(receipt));
  }
  return receipts;
}

// Receipts that say only which files exist.
std::vector<Receipt> only_files(std::vector<Receipt> receipts) {
  for (Receipt& receipt : receipts) {
    receipt.tensors.clear();
    receipt.chunks.clear();
    receipt.objects.clear();
  }
  return receipts;
}

}  // namespace

ForeignWritten write_foreign(const Location& location, const ForeignShare& share,
                             const Resources& resources, Deadline deadline) {
  SaveOptions options;
  options.resources = resources;
  engine::check_options(options);
  const auto place = share.sibling.empty()
                         ? location.shared()
                         : engine::sibling_storage(location.storage(), share.sibling);
  if (share.sibling.empty() && share.rank != 0) {
    engine::expect_begun_here(*place, share.save_id, deadline);
  }
  const ShareItems made = items_of(share);
  engine::WriteTask task{&made.items, &made.plan, made.assignment};
  task.rank = share.rank;
  task.world_size = share.world_size;
  task.save_id = share.save_id;
  task.first_file = share.first_file;
  Receipt receipt =
      engine::write_items(*place, *engine::format_of(options), task, options, deadline);

  ForeignWritten written;
  written.files = static_cast<int>(receipt.files.size());
  for (const Receipt::Object& object : receipt.objects) {
    written.encoded.push_back(place_of(receipt, object.at));
  }
  written.chunks.resize(share.chunks.size());
  for (size_t i = 0; i < receipt.chunks.size(); ++i) {
    written.chunks[made.order[i]] = place_of(receipt, receipt.chunks[i].at);
  }
  move_chunks(share, receipt);
  written.receipt = receipt.encode();
  return written;
}

struct ForeignSave::State {
  Location location;
  std::string save_id;
  std::shared_ptr<const Format> format;
  std::shared_ptr<const Dialect> dialect;
  std::optional<engine::Transaction> transaction;  // absent once the save is over
  pid_t process;                                   // that has begun the save

  void prepare(std::vector<Receipt> receipts, Index index, bool manifest, Deadline deadline) {
    std::vector<Bytes> encoded;
    for (const Receipt& receipt : receipts) encoded.push_back(receipt.encode());
    transaction->prepare({.save = {.receipts = std::move(receipts),
                                   .encoded = encoded,
                                   .of_dialect = std::move(index)},
                          .manifest = manifest},
                         deadline);
  }

  void prepare_without_manifest(std::vector<Receipt> receipts, Index index, const std::string& why,
                                Deadline deadline) {
    log(LogLevel::kWarning, "the checkpoint at " + location.describe() +
                                " has no manifest, and so no checksums: " + why);
    prepare(only_files(std::move(receipts)), std::move(index), false, deadline);
  }
};

// In a forked child the save still belongs to the parent.
void ForeignSave::Ends::operator()(State* state) const {
  if (state->process != ::getpid()) return;
  if (state->transaction) state->transaction->abandon(false);
  delete state;
}

ForeignSave::ForeignSave(const Location& location, std::string save_id, bool overwrite,
                         Deadline deadline)
    : state_(new State{location, std::move(save_id), engine::format_of(SaveOptions()),
                       pytorch_dialect(), std::nullopt, ::getpid()}) {
  state_->transaction.emplace(location.shared()->until(deadline), state_->format, state_->dialect,
                              state_->save_id, overwrite);
  state_->transaction->begin(deadline);
}

const std::string& ForeignSave::save_id() const { return state_->save_id; }

std::string ForeignSave::sibling() const {
  return state_->transaction ? state_->transaction->sibling() : std::string();
}

void ForeignSave::commit(std::span<const Bytes> receipts, int world_size, Bytes index,
                         std::span<const std::string> files, Deadline deadline) {
  if (!state_->transaction) throw Error(ErrorCode::kInvalidArgument, "the save is over");
  const Index described = {{kIndexName, std::move(index), IndexRole::kSwitch}};
  std::vector<std::string> written;  // by write_foreign(), on all ranks
  try {
    std::vector<Receipt> decoded = receipts_of(receipts, world_size, state_->save_id);
    written = files_of(decoded, state_->save_id);
    for (const std::string& name : files) {
      const auto found = state_->transaction->storage()->stat(name);
      if (!found) throw Error(ErrorCode::kNotFound, "a data file is missing").with_file(name);
      decoded.front().files.push_back({name, found->size});
    }
    if (!files.empty()) {
      state_->prepare_without_manifest(std::move(decoded), described,
                                       "the program wrote some of its files itself", deadline);
    } else {
      try {
        state_->prepare(decoded, described, true, deadline);
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kCoverage) throw;
        state_->prepare_without_manifest(std::move(decoded), described, error.what(), deadline);
      }
    }
    state_->transaction->commit(deadline.without_interrupt());
  } catch (...) {
    if (state_->transaction->was_tried()) {
      state_->transaction.reset();
    } else {
      engine::remove_files(*state_->transaction->storage(), written);
      abandon(true);
    }
    throw;
  }
  state_->transaction->clean();
  state_->transaction.reset();
}

void ForeignSave::abandon(bool none_writes) {
  if (!state_->transaction) return;
  state_->transaction->abandon(none_writes);
  state_->transaction.reset();
}

}  // namespace tilestone
