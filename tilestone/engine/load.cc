#include "tilestone/engine/load.h"

#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/agreement_internal.h"
#include "tilestone/engine/opening_internal.h"
#include "tilestone/engine/reader_internal.h"
#include "tilestone/engine/resources_internal.h"
#include "tilestone/engine/targets_internal.h"
#include "tilestone/plan/load_plan.h"

namespace tilestone {
namespace engine {
namespace {

// One rank's part in one load.
class Loading {
 public:
  Loading(const Location& location, const LoadOptions& options)
      : location_(location),
        options_(options),
        rounds_(options.comm, "load", deadline_after(options.timeout)),
        threads_(thread_count(options.threads)) {}

  StateDict run(const StateDict& wanted) {
    describe();
    StateDict loaded;
    rounds_.run_last(
        "loading",
        [&](Deadline deadline) {
          open(deadline);
          loaded = load_rank(wanted, deadline);
          return Bytes();
        },
        [](std::vector<Bytes>) { return std::vector<Bytes>(); });
    return loaded;
  }

 private:
  // One rank looks: ranks that look for themselves may see different things.
  void describe() {
    rounds_.run(
        "opening", [](Deadline) { return Bytes(); },
        [&](std::vector<Bytes>) {
          const auto format = find_format(location_.storage(), options_.format);
          description_ = read_description(location_.storage(), *format).encode();
          return std::vector<Bytes>();
        });
  }

  void open(Deadline deadline) {
    description_ = options_.comm.broadcast(description_, 0, deadline);
    opened_ = open_description(Description::decode(description_), options_.format);
    description_ = Bytes();
  }

  StateDict load_rank(const StateDict& wanted, Deadline deadline) {
    const StateDict built = with_memory(build_factories(wanted));
    const StateDict persistent = drop_nonpersistent(built);
    Items items = opened_.format->to_items(persistent);
    const ReadContext context{
        location_.storage(),
        *opened_.format,
        opened_.metadata,
        make_pool(options_.buffer_bytes, threads_.size(), wanted_bytes(items)),
        threads_,
        options_.verify_checksums,
        deadline};
    load_objects(context, items);
    load_tensors(context, items);
    StateDict loaded = opened_.format->from_items(persistent, items);
    return merge_factories(restore_nonpersistent(std::move(loaded), built), wanted);
  }

  static uint64_t wanted_bytes(const Items& items) {
    uint64_t bytes = 0;
    for (const TensorItem& item : items.tensors) {
      for (const Piece& piece : item.pieces) bytes += piece.data.bytes();
    }
    return bytes;
  }

  void load_objects(const ReadContext& context, Items& items) const {
    std::vector<const StoredObject*> stored;
    for (const ObjectItem& item : items.objects) {
      const StoredObject* found = opened_.metadata.find_object(item.key);
      if (found == nullptr) fail_not_found(item.key);
      stored.push_back(found);
    }
    std::vector<Bytes> bytes = read_objects(context, stored);
    for (size_t i = 0; i < items.objects.size(); ++i) {
      try {
        items.objects[i].value = opened_.format->parse_object(bytes[i]);
      } catch (...) {
        throw current_error()
            .with_key(items.objects[i].key)
            .with_file(opened_.metadata.files[stored[i]->at.file]);
      }
      bytes[i] = Bytes();
    }
  }

  void load_tensors(const ReadContext& context, const Items& items) const {
    LoadPlanOptions plan_options;
    plan_options.cast = options_.cast;
    LoadPlan plan = plan_load(items.tensors, opened_.metadata, plan_options);
    std::vector<Transfer> transfers;
    transfers.reserve(plan.reads.size());
    for (ChunkRead& read : plan.reads) {
      const Piece& piece = items.tensors[read.item].pieces[read.piece];
      const Box& stored = opened_.metadata.tensors[read.tensor].chunks[read.chunk].box;
      transfers.push_back({read.tensor, read.chunk, relative(read.box, stored),
                           narrow_to(piece.data, relative(read.box, piece.box))});
    }
    for (const LoadPlan::Fill& fill : plan.fills) {
      const Piece& piece = items.tensors[fill.item].pieces[fill.piece];
      fill_zero(narrow_to(piece.data, relative(fill.box, piece.box)));
    }
    ProgressMeter progress(options_.progress, "read", stored_bytes(opened_.metadata, transfers));
    read_transfers(context, transfers, progress);
    progress.finish();
  }

  static Box relative(const Box& box, const Box& origin) {
    Box shifted = box;
    for (size_t d = 0; d < box.rank(); ++d) shifted.offset[d] -= origin.offset[d];
    return shifted;
  }

  [[noreturn]] void fail_not_found(const std::string& key) const {
    Error error(ErrorCode::kNotFound, opened_.metadata.find_tensor(key) != nullptr
                                          ? "a tensor of the checkpoint is wanted as an object"
                                          : "an object that is not in the checkpoint");
    std::string similar;
    for (const std::string& other : similar_keys(opened_.metadata, key)) {
      similar += (similar.empty() ? "similar keys: " : ", ") + other;
    }
    throw std::move(error).with_key(key).with_hint(similar);
  }

  const Location& location_;
  const LoadOptions& options_;
  Rounds rounds_;
  ThreadPool threads_;
  Bytes description_;
  Opened opened_;
};

}  // namespace
}  // namespace engine

StateDict load(const StateDict& wanted, const Location& location, const LoadOptions& options) {
  return engine::Loading(location, options).run(wanted);
}

}  // namespace tilestone
