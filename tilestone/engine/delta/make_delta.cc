#include <algorithm>
#include <chrono>
#include <span>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/convert/one_file_target_internal.h"
#include "tilestone/engine/convert/stored_source_internal.h"
#include "tilestone/engine/delta/box_crc_internal.h"
#include "tilestone/engine/delta/compare_internal.h"
#include "tilestone/engine/delta/delta.h"
#include "tilestone/engine/delta/delta_file_internal.h"
#include "tilestone/engine/run/progress_internal.h"
#include "tilestone/engine/run/resources_internal.h"

namespace tilestone {
namespace engine {
namespace {

// A tensor of one version or of both.
struct Pair {
  DeltaTensor tensor;
  TensorView a = {}, b = {};  // without data: not in this version
};

bool is_kept(const StoredTensor* before, const StoredTensor& after) {
  return before != nullptr && before->dtype == after.dtype && before->shape == after.shape;
}

class DeltaOfTwo {
 public:
  DeltaOfTwo(const Location& a, const Location& b, const DeltaOptions& options)
      : options_(options),
        a_(StoredSource::open(a, opening_of(options))),
        b_(StoredSource::open(b, opening_of(options))),
        threads_(thread_count(options.resources.threads)) {
    for (const StoredTensor& tensor : b_->metadata().tensors) {
      const StoredTensor* const before = a_->metadata().find_tensor(tensor.key);
      add(is_kept(before, tensor) ? before : nullptr, &tensor);
    }
    for (const StoredTensor& tensor : a_->metadata().tensors) {
      const StoredTensor* const after = b_->metadata().find_tensor(tensor.key);
      if (!is_kept(after, tensor)) add(&tensor, nullptr);
    }
  }

  // Adds what has changed to the body.
  DeltaIndex run(DeltaBody& body) {
    uint64_t bytes = 0;
    for (const Pair& pair : pairs_) {
      for (const TensorView* view : {&pair.a, &pair.b}) {
        if (view->device != nullptr) bytes += view->bytes();
      }
    }
    ProgressMeter progress(options_.progress, "compare", bytes);
    std::vector<DeltaTensor> tensors;
    for (Pair& pair : pairs_) {
      try {
        compare(pair, body, progress);
      } catch (Error& error) {
        error.with_key(pair.tensor.key);
        throw;
      }
      tensors.push_back(std::move(pair.tensor));
    }
    progress.finish();
    return make_index(std::move(tensors));
  }

  uint64_t objects() const { return b_->metadata().objects.size(); }

 private:
  void add(const StoredTensor* a, const StoredTensor* b) {
    const StoredTensor& any = b != nullptr ? *b : *a;
    Pair pair{.tensor = {.key = any.key, .dtype = any.dtype, .shape = any.shape}};
    if (a != nullptr) pair.a = a_->tensor(*a, a->dtype);
    if (b != nullptr) pair.b = b_->tensor(*b, b->dtype);
    pairs_.push_back(std::move(pair));
  }

  static ByteView read(const TensorView& view, uint64_t begin, uint64_t size, Bytes& memory) {
    if (view.device == nullptr) return {};
    memory.resize(size);
    const DeviceCopy copy{view.device, begin, memory};
    copy_now(CopyTo::kHost, {&copy, 1});
    return memory;
  }

  void compare(Pair& pair, DeltaBody& body, ProgressMeter& progress) {
    DeltaTensor& tensor = pair.tensor;
    const bool in_a = pair.a.device != nullptr, in_b = pair.b.device != nullptr;
    const std::vector<Box> boxes = pieces_of(Box::whole(tensor.shape), itemsize(tensor.dtype));
    uint32_t before = 0, after = 0;
    for (const auto& [some, begin, size] : some_at_once(boxes, itemsize(tensor.dtype))) {
      const ByteView base = read(pair.a, begin, size, base_);
      const ByteView now = read(pair.b, begin, size, now_);
      for (const ComparedPiece& piece : compare_pieces(tensor, some, base, now, true, threads_)) {
        before ^= piece.before;
        after ^= piece.after;
        if (!piece.encoded) continue;
        tensor.pieces.push_back(body.add(tensor, piece.box, *piece.encoded, piece.now));
      }
      progress.add(base.size() + now.size());
    }
    if (in_a) tensor.before = crc_of_portions(before, tensor.bytes());
    if (in_b) tensor.after = crc_of_portions(after, tensor.bytes());
  }

  const DeltaOptions& options_;
  const std::shared_ptr<StoredSource> a_;
  const std::shared_ptr<StoredSource> b_;
  ThreadPool threads_;
  std::vector<Pair> pairs_;
  Bytes base_, now_;
};

}  // namespace
}  // namespace engine

DeltaReport make_delta(const Location& a, const Location& b, const Location& path,
                       const DeltaOptions& options) {
  const auto began = std::chrono::steady_clock::now();
  if (!path.describe().ends_with(".safetensors")) {
    throw Error(ErrorCode::kInvalidArgument, "a delta is a file whose name ends with .safetensors")
        .with_file(path.describe());
  }
  try {
    DeltaReport report;
    engine::make_one_file(
        path, [&](const std::shared_ptr<Storage>& directory, const std::string& name) {
          engine::DeltaOfTwo both(a, b, options);
          engine::DeltaBody body(directory);
          const DeltaIndex index = both.run(body);
          report = engine::report_of(index);
          report.left_out = both.objects();
          const Bytes header = write_delta_header(body.entries(), &index);
          report.bytes = header.size() + body.bytes();
          body.write(*directory, name, header, Deadline::never().with_interrupt(options.interrupt));
          return name;
        });
    report.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    return report;
  } catch (...) {
    rethrow_cause();
  }
}

}  // namespace tilestone
