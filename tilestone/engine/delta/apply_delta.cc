#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/convert/convert_source_internal.h"
#include "tilestone/engine/convert/stored_source_internal.h"
#include "tilestone/engine/delta/box_crc_internal.h"
#include "tilestone/engine/delta/check_internal.h"
#include "tilestone/engine/delta/delta.h"
#include "tilestone/engine/delta/delta_file_internal.h"
#include "tilestone/engine/delta/walk_internal.h"
#include "tilestone/engine/run/progress_internal.h"
#include "tilestone/engine/run/resources_internal.h"
#include "tilestone/format/known/known.h"

namespace tilestone {
namespace engine {
namespace {

// Makes what is read of the base the new version.
class DeltaPatch final : public TensorPatch {
 public:
  DeltaPatch(std::shared_ptr<const DeltaFile> delta, size_t threads)
      : delta_(std::move(delta)), threads_(threads) {}

  bool supplies(const StoredTensor& tensor) const override {
    return !delta_->in_result(tensor.key)->before;
  }
  void apply(const StoredTensor& tensor, uint64_t begin, MutableByteView elements) const override {
    const auto item = static_cast<int64_t>(itemsize(tensor.dtype));
    const auto first = static_cast<int64_t>(begin) / item;
    const FlatRange range{first, first + static_cast<int64_t>(elements.size()) / item};
    std::vector<DeltaShard> shards;
    for (const Box& box : flat_range_to_boxes(tensor.shape, range)) {
      shards.push_back({{tensor.key, tensor.dtype, tensor.shape, box},
                        TensorView::contiguous(elements.data(), tensor.dtype, box.shape)});
      elements = elements.subspan(shards.back().sum.bytes());
    }
    const DeltaTensor& change = *delta_->in_result(tensor.key);
    walk(shards, parts_of(shards, all_of(shards)), threads_,
         {.work = [&](ShardPart& part) { delta_->apply(change, part.box, part.now); }});
  }

  // The tensors of the new version in the place of the base's.
  std::vector<SourceEntry> entries(const ConvertSource& base) {
    std::vector<SourceEntry> entries;
    for (const DeltaTensor& tensor : delta_->index().tensors) {
      if (tensor.removed()) continue;
      const StoredTensor* const found = base.metadata().find_tensor(tensor.key);
      if (tensor.before) {
        entries.push_back({found});
        continue;
      }
      StoredTensor added{.key = tensor.key, .dtype = tensor.dtype, .shape = tensor.shape};
      if (found != nullptr) added.path = found->path;
      added.order = found != nullptr ? found->order : static_cast<uint32_t>(base.entries.size());
      entries.push_back({&added_.emplace_back(std::move(added))});
    }
    for (const SourceEntry& entry : base.entries) {
      if (entry.object != nullptr) entries.push_back(entry);
    }
    return entries;
  }

 private:
  const std::shared_ptr<const DeltaFile> delta_;
  mutable ThreadPool threads_;
  std::deque<StoredTensor> added_;
};

// The tensors of the delta, whole, with their elements in the base.
std::vector<DeltaShard> shards_of(StoredSource& source, const std::vector<DeltaTensor>& tensors) {
  std::vector<DeltaShard> shards;
  for (const DeltaTensor& tensor : tensors) {
    const Box whole = Box::whole(tensor.shape);
    DeltaShard& shard =
        shards.emplace_back(DeltaShard{{tensor.key, tensor.dtype, tensor.shape, whole}});
    if (tensor.before) {
      shard.now = source.tensor(*source.metadata().find_tensor(tensor.key), tensor.dtype);
    }
  }
  return shards;
}

// Compares the base with what the delta says of it, and of what becomes of it.
void check_base(StoredSource& source, DeltaFile& delta, const DeltaOptions& options) {
  SummedTensors before, after;
  for (const StoredTensor& tensor : source.metadata().tensors) {
    before[tensor.key] = {tensor.dtype, tensor.shape};
  }
  expect_keys(delta, before);
  const std::vector<DeltaTensor>& tensors = delta.index().tensors;
  std::vector<DeltaShard> shards = shards_of(source, tensors);
  uint64_t bytes = 0;
  for (const DeltaTensor& tensor : tensors) {
    if (tensor.after) after[tensor.key] = {tensor.dtype, tensor.shape};
    bytes += tensor.bytes();
  }
  ThreadPool threads(thread_count(options.resources.threads));
  delta.verify(threads, DeltaFile::kMaxKept);
  ProgressMeter progress(options.progress, "verify", bytes);
  const auto work = [&](ShardPart& part) {
    const DeltaTensor& tensor = tensors[part.shard];
    const uint64_t item = itemsize(tensor.dtype);
    Bytes added;
    if (!tensor.before) added.resize(static_cast<uint64_t>(part.box.numel()) * item);
    const MutableByteView elements = tensor.before ? part.now : MutableByteView(added);
    part.before = part.after = crc_portion(elements, part.box, tensor.shape, item);
    if (tensor.unchanged() || tensor.removed()) return;
    delta.apply(tensor, part.box, elements);
    part.after = crc_portion(elements, part.box, tensor.shape, item);
  };
  const auto then = [&](ShardPart& part) {
    const DeltaTensor& tensor = tensors[part.shard];
    if (tensor.before) before.find(tensor.key)->second.boxes[part.box].first = part.before;
    if (tensor.after) after.find(tensor.key)->second.boxes[part.box].first = part.after;
    progress.add(static_cast<uint64_t>(part.box.numel()) * itemsize(tensor.dtype));
  };
  walk(shards, parts_of(shards, all_of(shards)), threads, {.work = work, .then = then});
  progress.finish();
  expect_base(delta, before);
  expect_result(delta, after);
}

ConvertOptions convert_options(const DeltaOptions& options) {
  ConvertOptions convert;
  convert.reading = options.reading;
  convert.checks = options.checks;
  convert.resources = options.resources;
  convert.progress = options.progress;
  convert.interrupt = options.interrupt;
  return convert;
}

bool names_a_file(const std::string& path) {
  return path.ends_with(".safetensors") || path.ends_with(".pt") || path.ends_with(".pth");
}

}  // namespace
}  // namespace engine

DeltaReport apply_delta(const Location& base, const Location& delta, const Location& target,
                        const DeltaOptions& options) {
  return engine::timed([&] {
    engine::expect_apart(base, target);
    ConvertOptions convert = engine::convert_options(options);
    const auto opened = std::make_shared<engine::DeltaFile>(
        engine::DeltaFile::open(delta, Deadline::never().with_interrupt(options.interrupt)));
    engine::ConvertSource source = engine::open_source(base, convert);
    if (!engine::names_a_file(target.describe()) && source.format() != "torch_save") {
      convert.format = source.format();
    }
    engine::check_base(*source.stored, *opened, options);
    const auto patch = std::make_shared<engine::DeltaPatch>(
        opened, engine::thread_count(options.resources.threads));
    source.entries = patch->entries(source);
    source.stored->patch_with(patch);
    engine::convert(std::move(source), target, convert);
    DeltaReport report = engine::report_of(opened->index());
    report.bytes = opened->bytes();
    return report;
  });
}

}  // namespace tilestone
