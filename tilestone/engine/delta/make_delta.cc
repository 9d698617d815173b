#include <algorithm>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/convert/one_file_target_internal.h"
#include "tilestone/engine/convert/stored_source_internal.h"
#include "tilestone/engine/delta/box_crc_internal.h"
#include "tilestone/engine/delta/delta.h"
#include "tilestone/engine/delta/delta_file_internal.h"
#include "tilestone/engine/delta/versions_internal.h"
#include "tilestone/engine/delta/walk_internal.h"
#include "tilestone/engine/run/progress_internal.h"
#include "tilestone/engine/run/resources_internal.h"

namespace tilestone {
namespace engine {
namespace {

// The tensors of `now` and those of `base` that it lacks, or has with another dtype or shape.
std::vector<DeltaShard> both(StoredSource& base, StoredSource& now) {
  std::vector<DeltaShard> shards;
  const auto add = [&](const StoredTensor& tensor) -> DeltaShard& {
    return shards.emplace_back(
        DeltaShard{{tensor.key, tensor.dtype, tensor.shape, Box::whole(tensor.shape)}});
  };
  const auto kept_in = [](const StoredSource& other, const StoredTensor& tensor) {
    const StoredTensor* const found = other.metadata().find_tensor(tensor.key);
    const bool same =
        found != nullptr && found->dtype == tensor.dtype && found->shape == tensor.shape;
    return same ? found : nullptr;
  };
  for (const StoredTensor& tensor : now.metadata().tensors) {
    DeltaShard& shard = add(tensor);
    shard.now = now.tensor(tensor, tensor.dtype);
    const StoredTensor* const before = kept_in(base, tensor);
    if (before != nullptr) shard.base = base.tensor(*before, tensor.dtype);
  }
  for (const StoredTensor& tensor : base.metadata().tensors) {
    if (kept_in(now, tensor) == nullptr) add(tensor).base = base.tensor(tensor, tensor.dtype);
  }
  return shards;
}

// Adds what has changed to the body.
DeltaIndex compare_both(std::vector<DeltaShard> shards, DeltaBody& body,
                        const DeltaOptions& options) {
  uint64_t bytes = 0;
  for (const auto& [sum, now, base] : shards) {
    if (now.device != nullptr) bytes += sum.bytes();
    if (base.device != nullptr) bytes += sum.bytes();
  }
  ProgressMeter progress(options.progress, "compare", bytes);
  ThreadPool threads(thread_count(options.resources.threads));
  compare_shards(shards, true, threads, [&](ShardPart& part) {
    const auto encoded = std::exchange(part.encoded, {});
    if (encoded) body.add(shards[part.shard].sum, part.box, *encoded, part.now);
    progress.add(part.base.size() + part.now.size());
  });
  progress.finish();
  std::vector<DeltaTensor> tensors;
  for (auto& [sum, now, base] : shards) {
    DeltaTensor& tensor = tensors.emplace_back(DeltaTensor{sum.key, sum.dtype, sum.shape});
    if (base.device != nullptr) tensor.before = crc_of_portions(sum.before, sum.bytes());
    if (now.device != nullptr) tensor.after = crc_of_portions(sum.after, sum.bytes());
    tensor.pieces = std::move(sum.pieces);
  }
  return make_index(std::move(tensors));
}

}  // namespace
}  // namespace engine

DeltaReport make_delta(const Location& a, const Location& b, const Location& path,
                       const DeltaOptions& options) {
  if (!path.describe().ends_with(".safetensors")) {
    throw Error(ErrorCode::kInvalidArgument, "a delta is a file whose name ends with .safetensors")
        .with_file(path.describe());
  }
  return engine::timed([&] {
    DeltaReport report;
    engine::expect_no_delta(a);
    engine::make_one_file(
        path, [&](const std::shared_ptr<Storage>& directory, const std::string& name) {
          const auto base = engine::StoredSource::open(a, engine::opening_of(options));
          const auto now = engine::StoredSource::open(b, engine::opening_of(options));
          engine::DeltaBody body(directory, "");
          const DeltaIndex index = engine::compare_both(engine::both(*base, *now), body, options);
          report = engine::report_of(index);
          report.left_out = now->metadata().objects.size();
          const Bytes header = write_delta_header(body.entries(), &index);
          report.bytes = header.size() + body.bytes();
          body.write(*directory, name, header, Deadline::never().with_interrupt(options.interrupt));
          return name;
        });
    return report;
  });
}

}  // namespace tilestone
