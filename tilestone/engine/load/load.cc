#include "tilestone/engine/load/load.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/base/host.h"
#include "tilestone/base/size_text.h"
#include "tilestone/engine/exchange/exchange_internal.h"
#include "tilestone/engine/load/load_internal.h"
#include "tilestone/engine/open/description_internal.h"
#include "tilestone/engine/open/opening_internal.h"
#include "tilestone/engine/read/empty_places_internal.h"
#include "tilestone/engine/read/everything_internal.h"
#include "tilestone/engine/read/findings_internal.h"
#include "tilestone/engine/read/objects_internal.h"
#include "tilestone/engine/read/optimizer_states_internal.h"
#include "tilestone/engine/read/places_internal.h"
#include "tilestone/engine/read/reader_internal.h"
#include "tilestone/engine/read/renamed_internal.h"
#include "tilestone/engine/read/requested_internal.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/engine/run/resources_internal.h"
#include "tilestone/engine/run/rounds_internal.h"
#include "tilestone/engine/run/step_times_internal.h"
#include "tilestone/engine/run/terms_internal.h"
#include "tilestone/plan/access.h"
#include "tilestone/plan/load_plan.h"

namespace tilestone {
namespace engine {
namespace {

constexpr double kReadShare = 0.8;  // of the time that is left: for choosing and reading

}  // namespace

// One rank's part in one load.
class LoadByRounds::Loading {
 public:
  Loading(const Communicator& comm, const std::string& location, Deadline deadline)
      : rounds_(comm, "load", location, deadline), comm_(rounds_.comm()) {}

  // The phases. Ranks meet in: a round that describes the checkpoint, whose description is then
  // broadcast; a round of access checks, on request; the exchange; and the round that ends reading.
  // What fails on this rank between two rounds is its message in the next one.
  LoadResult read(const MadeLoad& request, bool last) {
    auto began = StepTimes::Clock::now();
    describe(request);
    steps_.set_name("load of " + location_->describe() + ", rank " + std::to_string(comm_.rank()));
    steps_.add_earlier("preparing", asked_.preparing);
    const Deadline deadline = rounds_.deadline().sooner(kReadShare);
    const std::optional<Error> failed = broadcast_description(deadline);
    end_step("describing", began);
    if (options().checks.access) validate(failed);
    std::variant<Wanted, Error> wanted = rounds_.result_or_error([&] {
      if (failed) throw *failed;
      return choose(deadline);
    });
    end_step("choosing", began);
    auto rest = rounds_.result_or_error([&] {
      return exchange_transfers(rounds_, way_, deadline, options().resources.buffer_bytes,
                                std::move(wanted));
    });
    end_step("exchanging", began);
    LoadResult result;
    const auto load = [&](Deadline) {
      if (const Error* const error = std::get_if<Error>(&rest)) throw *error;
      result.state = read_rest(std::get<std::vector<Transfer>>(std::move(rest)));
      return with_bytes(message_, bytes_);
    };
    const auto judge = [&](std::vector<Bytes> of_ranks) {
      return this->judge(std::move(of_ranks));
    };
    const Bytes answer =
        last ? rounds_.run_last("loading", load, judge) : rounds_.run("loading", load, judge);
    end_step("reading", began);
    result.report = decode_report(answer);
    result.report.bytes_loaded = bytes_;
    result.report.timings = steps_.all();
    result.kept = requested_.kept();
    if (last) log_loaded();
    return result;
  }

  void finish(const std::optional<Error>& failed) {
    const auto outcome = [&](Deadline) {
      if (failed) throw *failed;
      return Bytes();
    };
    const auto nothing = [](const std::vector<Bytes>&) { return std::vector<Bytes>(); };
    // All ranks have loaded. Only what was handed over to others may be unknown.
    const auto go_without = [](const Error& lost) -> std::optional<Bytes> {
      if (lost.code() != ErrorCode::kRankFailed) return std::nullopt;
      log(LogLevel::kWarning,
          "load: every rank has loaded, but the coordinator (rank 0) gave no "
          "last answer: " +
              lost.message());
      return Bytes();
    };
    rounds_.run_last("handing over the loaded state", outcome, nothing, go_without);
    end_step("handing over", ended_);
    log_loaded();
  }

  const std::vector<StepTime>& timings() const { return steps_.all(); }

  void leave(const Error& why) noexcept { rounds_.leave(why); }

 private:
  // Rank 0's answer to what all ranks have loaded.
  std::vector<Bytes> judge(std::vector<Bytes> of_ranks) {
    for (Bytes& message : of_ranks) bytes_of_ranks_ += take_bytes(message);
    // With a template, what is missing is an error.
    for (const std::string& note : opened_.metadata.notes) {
      if (asked_.wanted == nullptr)
        log(LogLevel::kWarning, "load: " + storage().describe() + ": " + note);
    }
    const LoadReport report = judge_requests(of_ranks, opened_.metadata, options());
    return std::vector<Bytes>(of_ranks.size(), encode_report(report));
  }

  const LoadOptions& options() const { return *asked_.options; }
  // After opening: the directory that stood there then, even if a save moves it.
  Storage& storage() const { return held_ != nullptr ? *held_ : location_->storage(); }

  // Ends the step that has begun then, and begins the next one.
  void end_step(std::string_view step, StepTimes::Clock::time_point& began) {
    steps_.add(step, began);
    ended_ = began = StepTimes::Clock::now();
  }

  void log_loaded() const {
    const bool coordinator = comm_.is_coordinator();
    const std::string by =
        coordinator
            ? "on " + counted(static_cast<uint64_t>(comm_.size()), "rank")
            : "by rank " + std::to_string(comm_.rank()) + " of " + std::to_string(comm_.size());
    log_ended(steps_, "loaded " + location_->describe(), coordinator ? bytes_of_ranks_ : bytes_, by,
              coordinator);
  }

  // A message to the coordinator with the bytes that this rank has loaded.
  static Bytes with_bytes(ByteView message, uint64_t bytes) {
    ByteWriter out;
    out.u64(bytes);
    out.raw(message);
    return std::move(out).take();
  }
  static uint64_t take_bytes(Bytes& message) {
    ByteReader in(message, "what a rank has loaded");
    const uint64_t bytes = in.u64();
    message.erase(message.begin(), message.begin() + sizeof(uint64_t));
    return bytes;
  }

  // Only the coordinator looks for the checkpoint: ranks that each look for themselves could see
  // different checkpoints.
  void describe(const MadeLoad& request) {
    const Bytes answer = rounds_.run(
        "opening",
        [&](Deadline) {
          if (const Error* const failed = std::get_if<Error>(&request)) throw *failed;
          asked_ = std::get<LoadView>(request);
          location_ = followed(*asked_.location, options().reading).until(rounds_.deadline());
          check_options(options());
          threads_.emplace(thread_count(options().resources.threads));
          if (asked_.wanted != nullptr) empty_ = empty_places(*asked_.wanted, options());
          const Bytes said = with_places(to_bytes(host_identity()), empty_);
          return with_terms(said, terms_of(*location_, options()));
        },
        [&](std::vector<Bytes> hosts) {
          agree_on_terms(hosts);
          const std::vector<std::string> empty = take_common_places(hosts);
          const ReadFor way = way_of_reading(hosts);
          set_found(find_checkpoint(location_->shared(), options().format, own_rank(),
                                    options().unmarked));
          return ways_of(way, hosts, empty);
        });
    ByteReader reader(answer, "how to read");
    way_ = static_cast<ReadFor>(reader.u8());
    ranks_here_ = reader.varint();
    std::unordered_set<std::string> empty;
    for (uint64_t left = reader.count(1); left > 0; --left) {
      empty.insert(std::string(reader.string()));
    }
    std::erase_if(empty_, [&](const Path& path) { return !empty.contains(dotted(path)); });
  }

  std::optional<Error> broadcast_description(Deadline deadline) {
    if (comm_.size() == 1) return std::nullopt;
    const bool has_it = comm_.is_coordinator();
    const auto shared = rounds_.result_or_error([&] {
      const Bytes encoded = rounds_.broadcast(has_it ? description_.encode() : Bytes(), deadline);
      if (!has_it) description_ = DescribingFiles::decode(encoded);
      return true;
    });
    const Error* const failed = std::get_if<Error>(&shared);
    return failed != nullptr ? std::optional(*failed) : std::nullopt;
  }

  // For each rank: how to read, the number of ranks on its host, and the places that are empty on
  // all ranks.
  static std::vector<Bytes> ways_of(ReadFor way, const std::vector<Bytes>& hosts,
                                    const std::vector<std::string>& empty) {
    std::map<std::string_view, uint64_t> ranks;
    for (const Bytes& host : hosts) ++ranks[as_text(host)];
    std::vector<Bytes> answers;
    for (const Bytes& host : hosts) {
      ByteWriter out;
      out.u8(static_cast<uint8_t>(way));
      out.varint(ranks.at(as_text(host)));
      out.varint(empty.size());
      for (const std::string& place : empty) out.string(place);
      answers.push_back(std::move(out).take());
    }
    return answers;
  }

  void set_found(Found found) {
    held_ = std::move(found.storage);
    description_ = std::move(found.description);
    of_own_rank_ = found.of_own_rank;
    sizes_ = std::make_shared<FileSizes>();
    warned_ = std::make_shared<WarnedFiles>();
  }

  // The rank whose own part of a rank-local checkpoint is tried first. nullopt unless a missing key
  // would be an error: has_all_of_own_rank() relies on that error to notice that the metadata of
  // all ranks is needed.
  std::optional<int> own_rank() const {
    using Policy = Differences::Policy;
    const LoadOptions& asked = options();
    const bool strict = asked.differences.not_in_checkpoint == Policy::kError &&
                        asked.differences.other_shape == Policy::kError &&
                        !asked.differences.not_requested;
    const bool named =
        asked.subtrees.empty() && asked.complete.empty() && asked.unmade.empty() && empty_.empty();
    if (asked_.wanted == nullptr || !strict || !named) return std::nullopt;
    return asked.own_rank;
  }

  ReadFor way_of_reading(const std::vector<Bytes>& identities) const {
    std::vector<std::string> hosts;
    for (const Bytes& identity : identities) hosts.emplace_back(as_text(identity));
    return reading_of_ranks(options().reading.two_phase, hosts, storage().facts());
  }

  void open() {
    opened_ = open_description(std::move(description_), options().format);
    if (options().rename) rename_keys(opened_.metadata, options().rename);
    if (asked_.optimizer != nullptr) rename_states(opened_.metadata);
    if (held_ != nullptr) return;
    held_ = hold(location_->shared());
    expect_same_checkpoint(*held_, opened_);
  }

  // Runs an additional round before tensors and objects are read.
  void validate(const std::optional<Error>& failed) {
    const auto describe_items = [&](Deadline deadline) {
      if (failed) throw *failed;
      choose_items(deadline);
      const bool asks = asked_.wanted != nullptr;
      return encode_access(asks ? requested_.items() : Items());
    };
    rounds_.run("validating the requests", describe_items, [](const std::vector<Bytes>& plans) {
      check_access(std::vector<ByteView>(plans.begin(), plans.end()));
      return std::vector<Bytes>();
    });
  }

  StateDict read_rest(std::vector<Transfer> left) {
    places_->choose(left);
    std::move(own_.begin(), own_.end(), std::back_inserter(left));
    read_transfers(*context_, left, *progress_);
    states_.finish();
    progress_->finish();
    return requested_.take_loaded(opened_);
  }

  void choose_items(Deadline deadline) {
    if (of_own_rank_) {
      if (has_all_of_own_rank(deadline)) return;
      set_found(
          find_checkpoint(location_->shared(), options().format, std::nullopt, options().unmarked));
    }
    look_for_items(deadline);
  }

  // Errors are ignored here: the metadata of all ranks is tried next, and reports its own errors.
  bool has_all_of_own_rank(Deadline deadline) {
    try {
      look_for_items(deadline);
      plan_load(requested_.items().tensors, opened_.metadata, {.cast = options().cast});
    } catch (const Error&) {
      return false;
    }
    const std::vector<ObjectItem>& objects = requested_.items().objects;
    return std::all_of(objects.begin(), objects.end(), [&](const ObjectItem& item) {
      return opened_.metadata.find_object(item.key) != nullptr;
    });
  }

  void look_for_items(Deadline deadline) {
    open();
    make_context({}, deadline);
    std::vector<Path> subtrees;
    if (asked_.wanted != nullptr) {
      subtrees = filled_places(*asked_.wanted, empty_, opened_.metadata, options(), comm_.size());
    }
    requested_ = Requested(asked_.wanted, opened_, options(),
                           read_common(*context_, opened_, options().sharded_only), subtrees);
  }

  // Decides what this rank reads, and from where. Reads the objects.
  Wanted choose(Deadline deadline) {
    if (!options().checks.access) choose_items(deadline);
    const std::vector<TensorItem>& asked = requested_.begin_reading();
    make_context(requested_.items(), deadline);
    const std::vector<TensorItem>& read = asked_.optimizer == nullptr ? asked : find_states(asked);
    requested_.expect_stored(read, opened_.metadata, options());
    if (asked_.wanted == nullptr) give_memory(requested_.items(), *context_);
    message_ = requested_.message(opened_.metadata, options());
    places_.emplace(opened_, comm_.rank(), comm_.size());
    const std::vector<ObjectItem*> items = requested_.objects_to_read(opened_, options());
    std::vector<ObjectRead> objects;
    for (const ObjectItem* item : items) {
      objects.push_back({opened_.metadata.find_object(item->key), 0});
    }
    std::vector<Transfer> transfers = plan_tensors(read);
    places_->expect(transfers, objects);
    for (ObjectRead& object : objects) object.place = places_->choose(*object.stored);
    load_objects(objects, items);
    requested_.expect_kinds();
    const bool open_few = way_ == ReadFor::kPageCache;
    own_ = places_->take_own_copies(transfers, requested_.replicas(), open_few);
    return Wanted{&*context_, std::move(transfers), &*progress_, places_->file_owners()};
  }

  // What is read for a distributed optimizer's states. Replaces its part of the common state.
  const std::vector<TensorItem>& find_states(const std::vector<TensorItem>& wanted) {
    const OptimizerRequest& asked = *asked_.optimizer;
    std::optional<Value>& common = requested_.items().common;
    const Value* const whole = common ? &*common : nullptr;
    if (is_by_parameter(optimizer_format(opened_.metadata, whole, asked.place))) return wanted;
    const auto layouts = [](const std::string& json) {
      return json.empty() ? std::vector<OptimizerLayout>() : parse_optimizer_layouts(json);
    };
    const OptimizerStates states(
        opened_.metadata,
        [this](const StoredObject& object) { return read_object(*context_, opened_, object); },
        {asked.layout_file.empty() ? layouts(asked.layouts)
                                   : optimizer_layouts_in(asked.layout_file),
         layouts(asked.own)},
        &wanted);
    states_ = states.reads_of(wanted, options().cast);
    common = states.common(common, asked.place);
    return states_.items;
  }

  void make_context(const Items& items, Deadline deadline) {
    const uint64_t bytes = wanted_bytes(items);
    const uint64_t pool = pool_share(options().resources.buffer_bytes, way_);
    // Where each call is a request, many are in flight for each read, so the threads need no
    // streams of their own: a request is of 8 MiB, or of a thread's share if that is less.
    const size_t threads = threads_->size();
    const auto buffers = storage().facts().costs_requests ? make_pool(pool, 1, bytes / threads)
                                                          : make_pool(pool, threads, bytes);
    context_.emplace(ReadContext{
        storage(), *opened_.format, opened_.metadata, buffers, *threads_,
        options().checks.checksums, deadline,
        cache_policy(options().reading.cache, bytes, ranks_here_, storage().available_cache()),
        warned_, sizes_, comm_.rank(), opened_.has_manifest_file()});
    context_->device_writes->expect(bytes);
  }

  static uint64_t wanted_bytes(const Items& items) {
    uint64_t bytes = 0;
    for (const TensorItem& item : items.tensors) {
      for (const Piece& piece : item.pieces) bytes += piece.data.bytes();
    }
    return bytes;
  }

  void load_objects(std::span<const ObjectRead> stored, std::span<ObjectItem* const> read) const {
    std::vector<Bytes> bytes = read_objects(*context_, stored);
    for (size_t i = 0; i < read.size(); ++i) {
      const std::string& file = opened_.metadata.files[stored[i].stored->at.file];
      read[i]->value = with_key_and_file(
          read[i]->key, file, [&] { return parse_object(opened_, std::move(bytes[i])); });
    }
  }

  // Plans the reads of stored chunks. Fills the remaining elements with zeros (LoadPlan::fills).
  std::vector<Transfer> plan_tensors(const std::vector<TensorItem>& read) {
    const LoadPlan plan = plan_load(read, opened_.metadata, {.cast = options().cast});
    std::vector<Transfer> transfers = transfers_of(plan, read, opened_.metadata);
    for (const LoadPlan::Fill& fill : plan.fills) {
      const Piece& piece = read[fill.item].pieces[fill.piece];
      fill_zero(narrow_to(piece.data, relative_to(fill.box, piece.box.offset)));
    }
    bytes_ = stored_bytes(opened_.metadata, transfers);
    progress_.emplace(options().progress, "read", bytes_);
    return transfers;
  }

  Rounds rounds_;
  const Communicator& comm_;
  LoadView asked_;
  std::optional<Location> location_;  // as it is read (Reading::follow_links)
  std::optional<ThreadPool> threads_;
  std::shared_ptr<Storage> held_;
  DescribingFiles description_;
  std::shared_ptr<FileSizes> sizes_ = std::make_shared<FileSizes>();  // of the described checkpoint
  std::shared_ptr<WarnedFiles> warned_ = std::make_shared<WarnedFiles>();
  bool of_own_rank_ = false;  // description_ has only this rank's part of a rank-local checkpoint
  Opened opened_;
  std::vector<Path> empty_;  // of the template: dicts and lists; once described: on all ranks
  Requested requested_;
  StateReads states_;  // instead of a distributed optimizer's
  Bytes message_;      // to the coordinator, after reading
  ReadFor way_ = ReadFor::kOneself;
  uint64_t ranks_here_ = 1;  // on this host
  std::optional<ReadContext> context_;
  std::optional<ProgressMeter> progress_;
  std::optional<Places> places_;
  std::vector<Transfer> own_;  // reads from copies in this rank's own file
  StepTimes steps_;
  StepTimes::Clock::time_point ended_ = {};  // the last of them
  uint64_t bytes_ = 0;                       // stored bytes of the tensors that this rank wants
  uint64_t bytes_of_ranks_ = 0;              // the same of all ranks, on the coordinator
};

LoadByRounds::LoadByRounds(const Communicator& comm, const std::string& location, Deadline deadline)
    : loading_(std::make_unique<Loading>(comm, location, deadline)) {}

LoadByRounds::~LoadByRounds() {
  if (!unfinished_) return;
  loading_->leave(
      Error(ErrorCode::kInterrupted, "a rank left the load before it took what was loaded"));
}

LoadResult LoadByRounds::read(const MadeLoad& request, bool last) {
  LoadResult result = loading_->read(request, last);
  unfinished_ = !last;
  return result;
}

const std::vector<StepTime>& LoadByRounds::timings() const { return loading_->timings(); }

void LoadByRounds::finish(const std::optional<Error>& failed) {
  unfinished_ = false;
  loading_->finish(failed);
}

}  // namespace engine

StateDict load(Wanted wanted, const Location& location, const LoadOptions& options) {
  try {
    engine::LoadByRounds load(options.comm, location.identity_or_empty(),
                              engine::deadline_of(options));
    engine::LoadResult loaded =
        load.read(engine::LoadView{wanted.state, &location, &options}, true);
    if (LoadReport* const report = options.differences.report) *report = std::move(loaded.report);
    return std::move(loaded.state);
  } catch (...) {
    rethrow_cause();
  }
}

}  // namespace tilestone
