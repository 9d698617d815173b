#include "tilestone/engine/checkpoint/checkpoint.h"

#include <algorithm>
#include <utility>

#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/engine/checkpoint/checkpoint_internal.h"
#include "tilestone/engine/checkpoint/mapped_reads_internal.h"
#include "tilestone/engine/open/attempt_files_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/read/items_internal.h"
#include "tilestone/engine/read/objects_internal.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/engine/run/resources_internal.h"
#include "tilestone/format/data_file_name.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/format.h"
#include "tilestone/plan/load_plan.h"

namespace tilestone {
namespace {

// `kind`: "tensor" or "object".
[[noreturn]] void fail_not_found(const Metadata& metadata, const std::string& key,
                                 const std::string& kind) {
  if (const StoredObject* object = metadata.find_object(key)) expect_supported(*object);
  if (metadata.find_tensor(key) != nullptr || metadata.find_object(key) != nullptr) {
    const std::string other = kind == "tensor" ? "an object" : "a tensor";
    throw Error(ErrorCode::kNotFound, "the checkpoint has " + other + " under this key, no " + kind)
        .with_key(key)
        .with_reason(kind == "tensor" ? Reason::kObjectStored : Reason::kTensorStored);
  }
  throw Error(ErrorCode::kNotFound, "the checkpoint has nothing under this key")
      .with_key(key)
      .with_reason(Reason::kKeyNotStored)
      .with_hint(similar_keys_hint(metadata, key));
}

const StoredTensor& find_tensor(const Metadata& metadata, const std::string& key) {
  const StoredTensor* found = metadata.find_tensor(key);
  if (found == nullptr) fail_not_found(metadata, key, "tensor");
  return *found;
}

const StoredObject& find_object(const Metadata& metadata, const std::string& key) {
  const StoredObject* found = metadata.find_object(key);
  if (found == nullptr) fail_not_found(metadata, key, "object");
  return *found;
}

TensorItem item_of(const StoredTensor& tensor, const Box& wanted) {
  with_key(tensor.key, [&] { check_bounds(wanted, tensor.shape); });
  TensorItem item;
  item.key = tensor.key;
  item.dtype = tensor.dtype;
  item.global_shape = tensor.shape;
  item.pieces.push_back({wanted, TensorView::without_data(tensor.dtype, wanted.shape)});
  return item;
}

std::optional<SaveRecord> record_of(const engine::Opened& opened, Storage& storage) {
  SaveRecord record;
  if (!opened.manifest) {
    const std::string& save_id = opened.metadata.save_id;
    if (!opened.metadata.rank_local || !engine::is_save_id(save_id)) return std::nullopt;
    auto head = engine::read_head(storage, save_id);
    if (!head) return std::nullopt;
    record.world_size = head->world_size;
    record.attributes = std::move(head->attributes);
    return record;
  }
  record.world_size = opened.manifest->world_size;
  for (const Receipt& receipt : opened.manifest->receipts) {
    record.hosts.push_back(receipt.host);
    for (std::vector<SaveRecord::Step>& steps = record.steps.emplace_back();
         const Receipt::Step& step : receipt.steps) {
      steps.push_back({step.name, 1e-6 * static_cast<double>(step.began),
                       1e-6 * static_cast<double>(step.microseconds)});
    }
  }
  record.attributes = opened.manifest->attributes;
  return record;
}

void expect_no_interrupt(const OpenOptions& options) {
  static_cast<void>(Deadline::never().with_interrupt(options.interrupt).expired());
}

engine::Found found_at(const Location& location, const OpenOptions& options) {
  engine::check_options(options);
  engine::Found found =
      engine::find_checkpoint(engine::followed(location, options.reading).shared(), options.format,
                              std::nullopt, options.unmarked);
  expect_no_interrupt(options);
  return found;
}

// Allocates the items' memory, after checking that the files are large enough for them.
void give_memory(const engine::ReadContext& context, const LoadPlan& plan,
                 std::span<TensorItem> items) {
  std::vector<std::vector<uint32_t>> chunks(items.size());
  std::vector<uint32_t> tensors(items.size());
  for (const ChunkRead& read : plan.reads) {
    chunks[read.item].push_back(read.chunk);
    tensors[read.item] = read.tensor;
  }
  for (size_t i = 0; i < items.size(); ++i) {
    const uint64_t bytes = checked_mul(static_cast<uint64_t>(numel(items[i].pieces[0].box.shape)),
                                       itemsize(items[i].dtype), "bytes of a tensor");
    if (chunks[i].empty()) continue;
    engine::expect_stored(context, bytes, context.metadata.tensors[tensors[i]], chunks[i]);
  }
  for (TensorItem& item : items) {
    item.pieces[0].data = TensorView::allocate(item.dtype, item.pieces[0].box.shape);
  }
}

// Reads into the items' pieces.
void run(const engine::ReadContext& context, const LoadPlan& plan,
         std::span<const TensorItem> items) {
  engine::ProgressMeter silent({}, "read", 0);
  engine::read_transfers(context, engine::transfers_of(plan, items, context.metadata), silent);
}

}  // namespace

engine::OpenCheckpoint::OpenCheckpoint(const Location& location, const OpenOptions& options)
    : OpenCheckpoint(found_at(location, options), options) {}

engine::OpenCheckpoint::OpenCheckpoint(Found found, const OpenOptions& options)
    : storage(std::move(found.storage)),
      opened(open_description(std::move(found.description), found.format.format)),
      buffers(make_pool(options.resources.buffer_bytes, thread_count(options.resources.threads),
                        opened.metadata.tensor_bytes())),
      verify_checksums(options.checks.checksums),
      cache(cache_policy(options.reading.cache, opened.metadata.tensor_bytes(), 1,
                         storage->available_cache())),
      threads(thread_count(options.resources.threads)) {
  expect_no_interrupt(options);
}

Checkpoint::State::State(const Location& location, const OpenOptions& options)
    : OpenCheckpoint(location, options),
      asked_cache(options.reading.cache),
      record(record_of(opened, *storage)) {}

Checkpoint Checkpoint::open(const Location& location, const OpenOptions& options) {
  return Checkpoint(std::make_shared<const State>(location, options));
}

Checkpoint Checkpoint::with_interrupt(std::shared_ptr<const Interrupt> interrupt) const {
  Checkpoint same = *this;
  same.interrupt_ = std::move(interrupt);
  return same;
}

Checkpoint Checkpoint::mapped() const {
  Checkpoint same = *this;
  same.mapped_ = std::make_shared<const engine::MappedReads>(state_->context(interrupt_));
  return same;
}

const Metadata& Checkpoint::metadata() const { return state_->opened.metadata; }
std::string_view Checkpoint::format_name() const { return format().name(); }
std::optional<int> Checkpoint::rank_of_file(std::string_view name) const {
  const auto parts = parse_data_file_name(name);
  return parts ? std::optional(parts->rank) : std::nullopt;
}
int Checkpoint::format_version() const { return format().backend_version(); }
std::string_view Checkpoint::dialect_name() const { return dialect().name(); }
bool Checkpoint::has_common() const { return !dialect().common_object().empty(); }
const Format& Checkpoint::format() const { return *state_->opened.format; }
const Dialect& Checkpoint::dialect() const { return *state_->opened.dialect; }
const std::optional<SaveRecord>& Checkpoint::save_record() const { return state_->record; }

std::vector<std::string> Checkpoint::keys() const {
  std::vector<std::string> keys;
  for (const StoredTensor& tensor : metadata().tensors) keys.push_back(tensor.key);
  for (const StoredObject& object : metadata().objects) keys.push_back(object.key);
  std::sort(keys.begin(), keys.end());
  return keys;
}

TensorView Checkpoint::read(const std::string& key, const std::optional<Box>& box) const {
  if (mapped_ != nullptr && !box) return std::move(read_many({&key, 1}).front());
  const StoredTensor& tensor = find_tensor(metadata(), key);
  TensorItem item = item_of(tensor, box ? *box : Box::whole(tensor.shape));
  const LoadPlan plan = plan_load({&item, 1}, metadata());
  const engine::ReadContext context = state_->context(interrupt_);
  give_memory(context, plan, {&item, 1});
  run(context, plan, {&item, 1});
  return std::move(item.pieces[0].data);
}

std::vector<TensorView> Checkpoint::read_many(std::span<const std::string> keys) const {
  std::vector<uint32_t> tensors;
  tensors.reserve(keys.size());
  for (const std::string& key : keys) {
    const StoredTensor& tensor = find_tensor(metadata(), key);
    tensors.push_back(static_cast<uint32_t>(&tensor - metadata().tensors.data()));
  }
  const engine::ReadContext context = state_->context(interrupt_);
  std::vector<std::optional<TensorView>> found(keys.size());
  if (mapped_ != nullptr) found = mapped_->find(context, tensors);
  std::vector<TensorItem> items;  // those that are not mapped
  items.reserve(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    const StoredTensor& tensor = metadata().tensors[tensors[i]];
    if (!found[i]) items.push_back(item_of(tensor, Box::whole(tensor.shape)));
  }
  const LoadPlan plan = plan_load(items, metadata());
  give_memory(context, plan, items);
  run(context, plan, items);
  std::vector<TensorView> read;
  read.reserve(keys.size());
  for (size_t i = 0, next = 0; i < keys.size(); ++i) {
    read.push_back(found[i] ? *std::move(found[i]) : std::move(items[next++].pieces[0].data));
  }
  return read;
}

void Checkpoint::read_into(const std::string& key, const std::optional<Box>& box,
                           const TensorView& target) const {
  const Part part{key, box ? *box : Box::whole(find_tensor(metadata(), key).shape), target};
  read_parts({&part, 1});
}

void Checkpoint::read_parts(std::span<const Part> parts) const {
  std::vector<TensorItem> items;
  items.reserve(parts.size());
  for (const Part& part : parts) {
    const StoredTensor& tensor = find_tensor(metadata(), part.key);
    const TensorView& target = part.target;
    if (target.shape != part.box.shape || target.dtype != tensor.dtype || !target.has_data()) {
      throw Error(ErrorCode::kInvalidArgument,
                  "the target is " + std::string(to_string(target.dtype)) + " of shape " +
                      to_string(target.shape) + ", but the read needs memory for " +
                      std::string(to_string(tensor.dtype)) + " of shape " +
                      to_string(part.box.shape))
          .with_key(part.key);
    }
    items.push_back(item_of(tensor, part.box));
    items.back().pieces[0].data = target;
  }
  run(state_->context(interrupt_), plan_load(items, metadata()), items);
}

Value Checkpoint::read_object(const std::string& key) const {
  return engine::read_object(state_->context(interrupt_), state_->opened,
                             find_object(metadata(), key));
}

std::optional<Value> Checkpoint::common() const {
  return engine::read_common(state_->context(interrupt_), state_->opened);
}

Bytes Checkpoint::read_object_bytes(const std::string& key) const {
  const std::optional<StoredObject>& common = state_->opened.common;  // stored as objects are
  const bool is_common = common && common->key == key;
  const engine::ObjectRead read{is_common ? &*common : &find_object(metadata(), key)};
  return std::move(engine::read_objects(state_->context(interrupt_), {&read, 1}).front());
}

VerifyReport Checkpoint::verify(const ProgressFn& progress, VerifiedFiles* shared) const {
  try {
    engine::ReadContext context = state_->context(interrupt_);
    // Nobody reads again soon what verify reads.
    context.cache = state_->asked_cache.value_or(CachePolicy::kBypass);
    return engine::verify_checkpoint(context, state_->opened, progress, shared);
  } catch (...) {
    rethrow_cause();
  }
}

}  // namespace tilestone
