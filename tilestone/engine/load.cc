#include "tilestone/engine/load.h"

#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/base/host.h"
#include "tilestone/engine/exchange/exchange_internal.h"
#include "tilestone/engine/open/opening_internal.h"
#include "tilestone/engine/read/as_stored_internal.h"
#include "tilestone/engine/read/objects_internal.h"
#include "tilestone/engine/read/reader_internal.h"
#include "tilestone/engine/read/shared_targets_internal.h"
#include "tilestone/engine/read/subtrees_internal.h"
#include "tilestone/engine/read/targets_internal.h"
#include "tilestone/engine/run/agreement_internal.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/engine/run/resources_internal.h"
#include "tilestone/engine/run/terms_internal.h"
#include "tilestone/plan/load_plan.h"

namespace tilestone {
namespace engine {
namespace {

// What a rank loads, from where and how; owned by whoever brings it.
struct Brought {
  const StateDict* wanted = nullptr;
  const Location* location = nullptr;
  const LoadOptions* options = nullptr;
};
using Bring = std::function<Brought()>;
using Take = std::function<void(StateDict)>;

// One rank's part in one load.
class Loading {
 public:
  Loading(Communicator comm, const std::string& place, Deadline deadline)
      : comm_(std::move(comm)), rounds_(comm_, "load", place, deadline) {}

  // `take` has a round of its own, which every rank of a load has or none.
  StateDict run(const Bring& bring, const Take& take) {
    describe(bring);
    StateDict loaded;
    const auto load = [&](Deadline deadline) {
      loaded = load_rank(*brought_.wanted, deadline);
      return std::move(left_out_);
    };
    const auto check = [&](const std::vector<Bytes>& of_ranks) {
      check_left_out(of_ranks, opened_.metadata);
      return std::vector<Bytes>();
    };
    if (!take) {
      rounds_.run_last("loading", load, check);
      return loaded;
    }
    rounds_.run("loading", load, check);
    const auto take_it = [&](Deadline) {
      take(std::move(loaded));
      return Bytes();
    };
    const auto nothing = [](const std::vector<Bytes>&) { return std::vector<Bytes>(); };
    rounds_.run_last("taking what was loaded", take_it, nothing);
    return {};
  }

 private:
  const LoadOptions& options() const { return *brought_.options; }
  // From the opening on: the directory as it stood then, wherever it is moved.
  Storage& storage() const { return held_ != nullptr ? *held_ : brought_.location->storage(); }

  // One rank looks: ranks that look for themselves may see different things.
  void describe(const Bring& bring) {
    const Bytes answer = rounds_.run(
        "opening",
        [&](Deadline) {
          prepare(bring);
          return with_terms(to_bytes(host_identity()), terms_of(*brought_.location, options()));
        },
        [&](std::vector<Bytes> hosts) {
          agree_on_terms(hosts);
          const Bytes way = {std::byte{static_cast<uint8_t>(way_of_reading(hosts))}};
          Found found = find_checkpoint(brought_.location->shared(), options().format);
          held_ = std::move(found.storage);
          description_ = std::move(found.description);
          return std::vector<Bytes>(hosts.size(), way);
        });
    way_ = static_cast<ReadFor>(answer.front());
  }

  void prepare(const Bring& bring) {
    brought_ = bring();
    check_options(options());
    threads_.emplace(thread_count(options().threads));
  }

  ReadFor way_of_reading(const std::vector<Bytes>& identities) const {
    std::vector<std::string> hosts;
    for (const Bytes& identity : identities) hosts.emplace_back(as_text(identity));
    return reading_of_ranks(options().two_phase, hosts,
                            storage().can(StorageCapability::kSharedCache));
  }

  void open(Deadline deadline) {
    if (comm_.size() > 1) {
      const bool tells = comm_.is_coordinator();
      const Bytes told = comm_.broadcast(tells ? description_.encode() : Bytes(), 0, deadline);
      if (!tells) description_ = Description::decode(told);
    }
    opened_ = open_description(std::move(description_), options().format);
    if (held_ != nullptr) return;
    held_ = hold(brought_.location->shared());
    expect_same_checkpoint(*held_, opened_);
  }

  StateDict load_rank(const StateDict& wanted, Deadline deadline) {
    Wants wants;
    std::variant<Wanted, Error> planned = plan(wanted, deadline, wants);
    const std::vector<Transfer> left =
        exchange_transfers(comm_, way_, deadline, options().buffer_bytes, std::move(planned));
    read_transfers(*context_, left, *progress_);
    progress_->finish();
    shared_.join(wants.items.tensors);
    return give_back(wanted, wants);
  }

  // What of the template is loaded.
  struct Wants {
    bool plain = false;
    StateDict built, persistent;
    Items items;
  };

  // A rank that fails here takes part in the exchange all the same, to let the others know.
  std::variant<Wanted, Error> plan(const StateDict& wanted, Deadline deadline, Wants& wants) {
    try {
      open(deadline);
      find_wants(wanted, deadline, wants);
      load_objects(*context_, wants.items);
      std::vector<Transfer> transfers = plan_tensors(wants.items);
      return Wanted{&*context_, std::move(transfers), &*progress_};
    } catch (...) {
      return current_error();
    }
  }

  void find_wants(const StateDict& wanted, Deadline deadline, Wants& wants) {
    wants.plain = is_plain(wanted);
    StateDict built = wants.plain ? wanted : build_factories(wanted);
    built = with_subtrees(std::move(built), options().subtrees, opened_.metadata);
    wants.built = with_memory(as_stored(std::move(built), opened_.metadata));
    if (!wants.plain) wants.persistent = drop_nonpersistent(wants.built);
    make_context({}, deadline);
    std::optional<Value> common = read_common(*context_, opened_);
    wants.items = opened_.dialect->wanted_items(wants.plain ? wants.built : wants.persistent,
                                                opened_.metadata, common ? &*common : nullptr);
    wants.items.common = std::move(common);
    shared_.part(wants.items.tensors);
    left_out_ = left_out(options().complete, wants.items, opened_.metadata);
    make_context(wants.items, deadline);
  }

  StateDict give_back(const StateDict& wanted, const Wants& wants) const {
    if (wants.plain) return opened_.dialect->from_items(wants.built, wants.items);
    StateDict loaded = opened_.dialect->from_items(wants.persistent, wants.items);
    return merge_factories(restore_nonpersistent(std::move(loaded), wants.built), wanted);
  }

  void make_context(const Items& items, Deadline deadline) {
    const uint64_t pool = pool_share(options().buffer_bytes, way_);
    context_.emplace(ReadContext{storage(), *opened_.format, opened_.metadata,
                                 make_pool(pool, threads_->size(), wanted_bytes(items)), *threads_,
                                 options().verify_checksums, deadline, options().cache});
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
        items.objects[i].value = parse_object(opened_, bytes[i]);
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
    plan_options.cast = options().cast;
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
    progress_.emplace(options().progress, "read", stored_bytes(opened_.metadata, transfers));
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

  const Communicator comm_;
  Rounds rounds_;
  Brought brought_;
  std::optional<ThreadPool> threads_;
  std::shared_ptr<Storage> held_;
  Description description_;
  Opened opened_;
  Bytes left_out_;  // what the coordinator must know at the end
  ReadFor way_ = ReadFor::kOneself;
  std::optional<ReadContext> context_;
  std::optional<ProgressMeter> progress_;
  SharedTargets shared_;
};

}  // namespace
}  // namespace engine

StateDict load(const StateDict& wanted, const Location& location, const LoadOptions& options) {
  try {
    const Deadline deadline =
        engine::deadline_of(options.timeout).with_interrupt(options.interrupt);
    return engine::Loading(options.comm, location.place(), deadline)
        .run([&] { return engine::Brought{&wanted, &location, &options}; }, {});
  } catch (...) {
    rethrow_cause();
  }
}

void load(const std::function<LoadRequest()>& prepare, const std::function<void(StateDict)>& take,
          const std::string& place, const Communicator& comm, Deadline deadline) {
  std::optional<LoadRequest> request;
  const auto bring = [&] {
    request.emplace(prepare());
    return engine::Brought{&request->wanted, &request->location, &request->options};
  };
  try {
    engine::Loading(comm, place, deadline).run(bring, take);
  } catch (...) {
    rethrow_cause();
  }
}

}  // namespace tilestone
