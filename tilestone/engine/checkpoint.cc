#include "tilestone/engine/checkpoint.h"

#include <algorithm>
#include <utility>

#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/checkpoint_internal.h"
#include "tilestone/engine/read/items_internal.h"
#include "tilestone/engine/read/objects_internal.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/engine/run/resources_internal.h"
#include "tilestone/plan/load_plan.h"

namespace tilestone {
namespace {

[[noreturn]] void fail_not_found(const Metadata& metadata, const std::string& key,
                                 const std::string& what) {
  std::string hint;
  for (const std::string& other : similar_keys(metadata, key)) {
    hint += (hint.empty() ? "similar keys: " : ", ") + other;
  }
  throw Error(ErrorCode::kNotFound, what).with_key(key).with_hint(hint);
}

const StoredTensor& find_tensor(const Metadata& metadata, const std::string& key) {
  const StoredTensor* found = metadata.find_tensor(key);
  if (found == nullptr) fail_not_found(metadata, key, "no tensor of this key in the checkpoint");
  return *found;
}

LoadPlan plan_read(const Metadata& metadata, const StoredTensor& tensor, const Box& wanted) {
  check_bounds(wanted, tensor.shape);
  TensorItem item;
  item.key = tensor.key;
  item.dtype = tensor.dtype;
  item.global_shape = tensor.shape;
  item.pieces.push_back({wanted, TensorView::without_data(tensor.dtype, wanted.shape)});
  return plan_load({&item, 1}, metadata);
}

std::optional<SaveRecord> record_of(const engine::Opened& opened) {
  if (!opened.manifest) return std::nullopt;
  return SaveRecord{.world_size = opened.manifest->world_size};
}

void run(const engine::ReadContext& context, const LoadPlan& plan, const Box& wanted,
         const TensorView& target) {
  std::vector<engine::Transfer> transfers;
  for (const ChunkRead& read : plan.reads) {
    const StoredTensor& tensor = context.metadata.tensors[read.tensor];
    Box in_chunk = read.box, in_target = read.box;
    for (size_t d = 0; d < wanted.rank(); ++d) {
      in_chunk.offset[d] -= tensor.chunks[read.chunk].box.offset[d];
      in_target.offset[d] -= wanted.offset[d];
    }
    transfers.push_back({read.tensor, read.chunk, std::move(in_chunk), target.narrow(in_target)});
  }
  engine::ProgressMeter silent({}, "read", 0);
  engine::read_transfers(context, transfers, silent);
}

}  // namespace

Checkpoint::State::State(std::shared_ptr<Storage> storage_in, engine::Opened opened_in,
                         const OpenOptions& options)
    : storage(std::move(storage_in)),
      opened(std::move(opened_in)),
      record(record_of(opened)),
      buffers(engine::make_pool(options.buffer_bytes, engine::thread_count(options.threads),
                                opened.metadata.tensor_bytes())),
      verify_checksums(options.verify_checksums),
      cache(options.cache),
      threads(engine::thread_count(options.threads)) {}

Checkpoint Checkpoint::open(const Location& location, const OpenOptions& options) {
  engine::check_options(options);
  const Deadline deadline = Deadline::never().with_interrupt(options.interrupt);
  engine::Found found = engine::find_checkpoint(location.shared(), options.format);
  static_cast<void>(deadline.expired());
  engine::Opened opened =
      engine::open_description(std::move(found.description), found.format.format);
  static_cast<void>(deadline.expired());
  return Checkpoint(
      std::make_shared<const State>(std::move(found.storage), std::move(opened), options));
}

Checkpoint Checkpoint::with_interrupt(std::shared_ptr<const Interrupt> interrupt) const {
  Checkpoint same = *this;
  same.interrupt_ = std::move(interrupt);
  return same;
}

const Metadata& Checkpoint::metadata() const { return state_->opened.metadata; }
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
  const StoredTensor& tensor = find_tensor(metadata(), key);
  const Box wanted = box ? *box : Box::whole(tensor.shape);
  const LoadPlan plan = plan_read(metadata(), tensor, wanted);
  std::vector<uint32_t> chunks;
  for (const ChunkRead& read : plan.reads) chunks.push_back(read.chunk);
  const uint64_t bytes = checked_mul(static_cast<uint64_t>(numel(wanted.shape)),
                                     itemsize(tensor.dtype), "bytes of a tensor");
  const engine::ReadContext context = state_->context(interrupt_);
  engine::expect_stored(context, bytes, tensor, chunks);
  const TensorView target = TensorView::allocate(tensor.dtype, wanted.shape);
  run(context, plan, wanted, target);
  return target;
}

void Checkpoint::read_into(const std::string& key, const std::optional<Box>& box,
                           const TensorView& target) const {
  const StoredTensor& tensor = find_tensor(metadata(), key);
  const Box wanted = box ? *box : Box::whole(tensor.shape);
  if (target.shape != wanted.shape || target.dtype != tensor.dtype || !target.has_data()) {
    throw Error(ErrorCode::kInvalidArgument,
                "target is " + std::string(to_string(target.dtype)) + " of shape " +
                    to_string(target.shape) + ", expected memory for " +
                    std::string(to_string(tensor.dtype)) + " of shape " + to_string(wanted.shape))
        .with_key(key);
  }
  run(state_->context(interrupt_), plan_read(metadata(), tensor, wanted), wanted, target);
}

Value Checkpoint::read_object(const std::string& key) const {
  const Bytes item = read_object_bytes(key);
  try {
    return engine::parse_object(state_->opened, item);
  } catch (...) {
    throw current_error().with_key(key).with_file(
        metadata().files[metadata().find_object(key)->at.file]);
  }
}

std::optional<Value> Checkpoint::common() const {
  return engine::read_common(state_->context(interrupt_), state_->opened);
}

Bytes Checkpoint::read_object_bytes(const std::string& key) const {
  const StoredObject* found = metadata().find_object(key);
  if (found == nullptr) fail_not_found(metadata(), key, "no object of this key in the checkpoint");
  return std::move(engine::read_objects(state_->context(interrupt_), {&found, 1}).front());
}

VerifyReport Checkpoint::verify(const ProgressFn& progress) const {
  try {
    return engine::verify_checkpoint(state_->context(interrupt_), state_->opened, progress);
  } catch (...) {
    rethrow_cause();
  }
}

}  // namespace tilestone
