#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/convert/convert_source_internal.h"
#include "tilestone/engine/convert/stored_source_internal.h"
#include "tilestone/engine/delta/box_crc_internal.h"
#include "tilestone/engine/delta/chain_internal.h"
#include "tilestone/engine/delta/compare_internal.h"
#include "tilestone/engine/delta/delta.h"
#include "tilestone/engine/delta/delta_file_internal.h"
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
    const DeltaTensor& changes = *delta_->in_result(tensor.key);
    if (changes.unchanged()) return;
    const auto item = static_cast<int64_t>(itemsize(tensor.dtype));
    const auto first = static_cast<int64_t>(begin) / item;
    const FlatRange range{first, first + static_cast<int64_t>(elements.size()) / item};
    for (const Box& box : flat_range_to_boxes(tensor.shape, range)) {
      const uint64_t size = static_cast<uint64_t>(box.numel() * item);
      delta_->apply(changes, box, elements.first(size), threads_);
      elements = elements.subspan(size);
    }
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

// Compares the base with what the delta says of it, and of what becomes of it.
class BaseCheck {
 public:
  BaseCheck(StoredSource& source, const DeltaFile& delta, const DeltaOptions& options)
      : source_(source),
        delta_(delta),
        options_(options),
        threads_(thread_count(options.resources.threads)) {}

  void run() {
    for (const StoredTensor& tensor : source_.metadata().tensors) expect_known(tensor);
    uint64_t bytes = 0;
    std::vector<TensorView> views;
    for (const DeltaTensor& tensor : delta_.index().tensors) {
      bytes += tensor.bytes();
      views.push_back(tensor.before ? source_.tensor(stored(tensor), tensor.dtype) : TensorView());
    }
    delta_.verify(threads_);
    ProgressMeter progress(options_.progress, "verify", bytes);
    for (size_t i = 0; i < views.size(); ++i) {
      check(delta_.index().tensors[i], views[i], progress);
    }
    progress.finish();
  }

 private:
  void expect_known(const StoredTensor& tensor) const {
    if (delta_.in_base(tensor.key) == nullptr) fail_base(delta_, tensor.key, "the delta's base has no such tensor");
  }

  const StoredTensor& stored(const DeltaTensor& tensor) const {
    const StoredTensor* const found = source_.metadata().find_tensor(tensor.key);
    if (found == nullptr) fail_base(delta_, tensor.key, "the tensor is not there");
    if (found->dtype == tensor.dtype && found->shape == tensor.shape) return *found;
    fail_base(
        delta_, tensor.key,
        fmt::format("the tensor is {} {}, and {} {} in the delta's base", to_string(found->dtype),
                    to_string(found->shape), to_string(tensor.dtype), to_string(tensor.shape)));
  }

  void check(const DeltaTensor& tensor, const TensorView& view, ProgressMeter& progress) {
    const uint64_t item = itemsize(tensor.dtype);
    const std::vector<Box> boxes = pieces_of(Box::whole(tensor.shape), item);
    uint32_t before = 0, after = 0;
    for (const auto& [some, begin, size] : some_at_once(boxes, item)) {
      elements_.assign(tensor.before ? 0 : size, std::byte{});
      elements_.resize(size);
      if (tensor.before) {
        const DeviceCopy copy{view.device, begin, elements_};
        copy_now(CopyTo::kHost, {&copy, 1});
      }
      const auto [old, made] = sum_and_apply(tensor, some);
      before ^= old;
      after ^= made;
      progress.add(size);
    }
    if (tensor.before) expect_base(delta_, tensor, crc_of_portions(before, tensor.bytes()));
    if (tensor.after) expect_result(delta_, tensor, crc_of_portions(after, tensor.bytes()));
  }

  std::pair<uint32_t, uint32_t> sum_and_apply(const DeltaTensor& tensor,
                                              std::span<const Box> boxes) {
    const uint64_t item = itemsize(tensor.dtype);
    std::vector<std::pair<uint32_t, uint32_t>> portions(boxes.size());
    std::vector<MutableByteView> parts;
    MutableByteView rest(elements_);
    for (const Box& box : boxes) {
      parts.push_back(rest.first(static_cast<uint64_t>(box.numel()) * item));
      rest = rest.subspan(parts.back().size());
    }
    threads_.parallel_for(boxes.size(), [&](size_t i) {
      portions[i].first = crc_portion(parts[i], boxes[i], tensor.shape, item);
      portions[i].second = portions[i].first;
      if (tensor.unchanged() || tensor.removed()) return;
      delta_.apply(tensor, boxes[i], parts[i], threads_);
      portions[i].second = crc_portion(parts[i], boxes[i], tensor.shape, item);
    });
    std::pair<uint32_t, uint32_t> sums;
    for (const auto& [before, after] : portions) {
      sums.first ^= before;
      sums.second ^= after;
    }
    return sums;
  }

  StoredSource& source_;
  const DeltaFile& delta_;
  const DeltaOptions& options_;
  ThreadPool threads_;
  Bytes elements_;
};

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
  const auto began = std::chrono::steady_clock::now();
  try {
    engine::expect_apart(base, target);
    ConvertOptions convert = engine::convert_options(options);
    const auto opened = std::make_shared<engine::DeltaFile>(
        engine::DeltaFile::open(delta, Deadline::never().with_interrupt(options.interrupt)));
    engine::ConvertSource source = engine::open_source(base, convert);
    if (!engine::names_a_file(target.describe()) && source.format() != "torch_save") {
      convert.format = source.format();
    }
    engine::BaseCheck(*source.stored, *opened, options).run();
    const auto patch = std::make_shared<engine::DeltaPatch>(
        opened, engine::thread_count(options.resources.threads));
    source.entries = patch->entries(source);
    source.stored->patch_with(patch);
    engine::convert(std::move(source), target, convert);
    DeltaReport report = engine::report_of(opened->index());
    report.bytes = opened->bytes();
    report.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    return report;
  } catch (...) {
    rethrow_cause();
  }
}

}  // namespace tilestone
