#include "tilestone/engine/load.h"

#include <optional>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/base/host.h"
#include "tilestone/engine/agreement_internal.h"
#include "tilestone/engine/as_stored_internal.h"
#include "tilestone/engine/exchange_internal.h"
#include "tilestone/engine/opening_internal.h"
#include "tilestone/engine/reader_internal.h"
#include "tilestone/engine/resources_internal.h"
#include "tilestone/engine/subtrees_internal.h"
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
        rounds_(options.comm, "load", location.describe(), deadline_after(options.timeout)),
        threads_(thread_count(options.threads)) {}

  StateDict run(const StateDict& wanted) {
    describe();
    StateDict loaded;
    rounds_.run_last(
        "loading",
        [&](Deadline deadline) {
          loaded = load_rank(wanted, deadline);
          return std::move(left_out_);
        },
        [&](const std::vector<Bytes>& of_ranks) {
          check_left_out(of_ranks, opened_.metadata);
          return std::vector<Bytes>();
        });
    return loaded;
  }

 private:
  // One rank looks: ranks that look for themselves may see different things.
  void describe() {
    const Bytes answer = rounds_.run(
        "opening", [&](Deadline) { return own_place(); },
        [&](const std::vector<Bytes>& places) {
          const Bytes way = {std::byte{static_cast<uint8_t>(agree_on_reading(places))}};
          const auto format = find_format(location_.storage(), options_.format);
          description_ = read_description(location_.storage(), *format);
          return std::vector<Bytes>(places.size(), way);
        });
    way_ = static_cast<ReadFor>(answer.front());
  }

  // What the coordinator must know of a rank: how it wants to read, and its host.
  Bytes own_place() const {
    ByteWriter writer;
    writer.u8(static_cast<uint8_t>(options_.two_phase));
    writer.string(host_identity());
    return std::move(writer).take();
  }

  ReadFor agree_on_reading(const std::vector<Bytes>& places) const {
    std::vector<std::string> hosts;
    std::optional<LoadOptions::TwoPhase> agreed;
    for (size_t rank = 0; rank < places.size(); ++rank) {
      ByteReader reader(places[rank], "place of rank " + std::to_string(rank));
      const auto mode = static_cast<LoadOptions::TwoPhase>(reader.u8());
      hosts.emplace_back(reader.string());
      if (agreed.value_or(mode) != mode) {
        throw Error(ErrorCode::kMismatch, "the ranks don't agree on two_phase")
            .with_rank(static_cast<int>(rank));
      }
      agreed = mode;
    }
    return reading_of_ranks(*agreed, hosts,
                            location_.storage().can(StorageCapability::kSharedCache));
  }

  void open(Deadline deadline) {
    if (options_.comm.size() > 1) {
      const bool tells = options_.comm.is_coordinator();
      const Bytes told =
          options_.comm.broadcast(tells ? description_.encode() : Bytes(), 0, deadline);
      if (!tells) description_ = Description::decode(told);
    }
    opened_ = open_description(std::move(description_), options_.format);
  }

  StateDict load_rank(const StateDict& wanted, Deadline deadline) {
    bool plain = false;
    StateDict built, persistent;
    Items items;
    const auto prepare = [&] {
      open(deadline);
      plain = is_plain(wanted);
      built = plain ? wanted : build_factories(wanted);
      built = with_subtrees(std::move(built), options_.subtrees, opened_.metadata);
      built = with_memory(as_stored(std::move(built), opened_.metadata));
      if (!plain) persistent = drop_nonpersistent(built);
      items = opened_.format->to_items(plain ? built : persistent);
      left_out_ = left_out(options_.complete, items, opened_.metadata);
      make_context(items, deadline);
      load_objects(*context_, items);
      return plan_tensors(items);
    };
    const bool alone = way_ == ReadFor::kOneself;
    const std::vector<Transfer> left = alone ? prepare() : exchange(prepare, deadline);
    read_transfers(*context_, left, *progress_);
    progress_->finish();
    if (plain) return opened_.format->from_items(built, items);
    StateDict loaded = opened_.format->from_items(persistent, items);
    return merge_factories(restore_nonpersistent(std::move(loaded), built), wanted);
  }

  template <typename Prepare>
  std::vector<Transfer> exchange(const Prepare& prepare, Deadline deadline) {
    const uint64_t message_bytes = memory_shares(options_.buffer_bytes, way_).messages;
    return exchange_transfers(options_.comm, way_, deadline, message_bytes, [&] {
      std::vector<Transfer> transfers = prepare();
      return Wanted{&*context_, std::move(transfers), &*progress_};
    });
  }

  void make_context(const Items& items, Deadline deadline) {
    const uint64_t pool = memory_shares(options_.buffer_bytes, way_).pool;
    context_.emplace(ReadContext{location_.storage(), *opened_.format, opened_.metadata,
                                 make_pool(pool, threads_.size(), wanted_bytes(items)), threads_,
                                 options_.verify_checksums, deadline});
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

  // What is to be read of the stored chunks; zeros are filled in.
  std::vector<Transfer> plan_tensors(const Items& items) {
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
    progress_.emplace(options_.progress, "read", stored_bytes(opened_.metadata, transfers));
    return transfers;
  }

  static Box relative(const Box& box, const Box& origin) {
    Box shifted = box;
    for (size_t d = 0; d < box.rank(); ++d) shifted.offset[d] -= origin.offset[d];
    return shifted;
  }

  [[noreturn]] void fail_not_found(const std::string& key) const {
    if (opened_.metadata.find_tensor(key) != nullptr) {
      throw Error(ErrorCode::kNotFound, "a tensor of the checkpoint is wanted as an object")
          .with_key(key)
          .with_hint("want an array of its dtype and shape in its place");
    }
    Error error(ErrorCode::kNotFound, "an object that is not in the checkpoint");
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
  Description description_;
  Opened opened_;
  Bytes left_out_;  // what the coordinator must know at the end
  ReadFor way_ = ReadFor::kOneself;
  std::optional<ReadContext> context_;
  std::optional<ProgressMeter> progress_;
};

}  // namespace
}  // namespace engine

StateDict load(const StateDict& wanted, const Location& location, const LoadOptions& options) {
  return engine::Loading(location, options).run(wanted);
}

}  // namespace tilestone
