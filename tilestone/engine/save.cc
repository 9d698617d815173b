#include "tilestone/engine/save.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/base/log.h"
#include "tilestone/engine/commit/commit_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/run/agreement_internal.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/engine/run/terms_internal.h"
#include "tilestone/engine/write/writer_internal.h"
#include "tilestone/format/torch_dist/torch_dist.h"
#include "tilestone/plan/grid_plan.h"
#include "tilestone/state/content_hash.h"

namespace tilestone {
namespace engine {
namespace {

constexpr double kCoordinatorShare = 0.8;  // of the time that is left

Bytes encode_keys(const std::vector<std::string>& keys) {
  ByteWriter writer;
  writer.varint(keys.size());
  for (const std::string& key : keys) writer.string(key);
  return std::move(writer).take();
}

std::vector<std::string> decode_keys(ByteView bytes) {
  ByteReader reader(bytes, "keys of empty tensors");
  std::vector<std::string> keys;
  for (uint64_t count = reader.count(); count > 0; --count) keys.emplace_back(reader.string());
  reader.expect_end();
  return keys;
}

// What a rank learns when the planning is agreed.
struct Orders {
  std::string save_id;
  bool by_rule = false;
  Assignment assignment;             // by exchange
  std::vector<std::string> empties;  // by rule: the tensors without elements that this rank writes
  std::vector<Dims> grids = {};      // of the tensors of its plan, where the format needs grids

  Bytes encode() const {
    ByteWriter writer;
    writer.string(save_id);
    writer.u8(by_rule ? 1 : 0);
    writer.varint(grids.size());
    for (const Dims& cell : grids) {
      writer.varint(cell.size());
      for (const int64_t extent : cell) writer.varint(static_cast<uint64_t>(extent));
    }
    if (by_rule) {
      writer.raw(encode_keys(empties));
    } else {
      writer.raw(assignment.encode());
    }
    return std::move(writer).take();
  }
  static Orders decode(ByteView bytes) {
    ByteReader reader(bytes, "orders of a save");
    Orders orders;
    orders.save_id = reader.string();
    orders.by_rule = reader.u8() != 0;
    for (uint64_t count = reader.count(); count > 0; --count) {
      Dims& cell = orders.grids.emplace_back();
      for (uint64_t dims = reader.count(); dims > 0; --dims) {
        cell.push_back(static_cast<int64_t>(reader.varint()));
      }
    }
    const ByteView rest = reader.raw(reader.remaining());
    if (orders.by_rule) {
      orders.empties = decode_keys(rest);
    } else {
      orders.assignment = Assignment::decode(rest);
    }
    return orders;
  }
};

// Orders, with the name of the directory beside the location into which a staged save goes.
Bytes with_staging(const std::string& name, ByteView orders) {
  ByteWriter writer;
  writer.string(name);
  writer.raw(orders);
  return std::move(writer).take();
}

// What a rank saves, where and how; owned by whoever brings it.
struct Brought {
  const StateDict* state = nullptr;
  const Location* location = nullptr;
  const SaveOptions* options = nullptr;
};
using Bring = std::function<Brought()>;

// One rank's part in one save.
class Saving {
 public:
  Saving(Communicator comm, const std::string& place, Deadline deadline)
      : comm_(std::move(comm)), deadline_(deadline), rounds_(comm_, "save", place, deadline) {}

  SaveResult run(const Bring& bring) {
    try {
      plan(bring);
    } catch (...) {
      if (commit_) commit_->abandon(is_alone());
      throw;
    }
    try {
      write();
    } catch (...) {
      // No report of this rank will be taken any more, so the save can't be published.
      discard();
      throw;
    }
    publish();
    return result_;
  }

 private:
  bool is_alone() const { return comm_.size() == 1; }
  bool by_rule() const { return options().agreement == SaveOptions::Agreement::kRule; }
  const SaveOptions& options() const { return *brought_.options; }
  Storage& storage() const {
    return staging_ != nullptr ? *staging_ : brought_.location->storage();
  }

  // Nothing at the location is changed before the ranks have agreed on all that can be agreed on.
  void plan(const Bring& bring) {
    const Bytes answer = rounds_.run(
        "planning",
        [&](Deadline) {
          prepare(bring);
          return with_terms(plan_locally(*brought_.state), terms_of(*brought_.location, options()));
        },
        [&](std::vector<Bytes> plans) {
          agree_on_terms(plans);
          const std::string save_id = random_save_id();
          std::vector<Bytes> orders = by_rule() ? orders_by_rule(plans, save_id)
                                                : orders_by_exchange(std::move(plans), save_id);
          commit_.emplace(brought_.location->shared(), format_, dialect_, save_id,
                          options().overwrite);
          commit_->begin(coordinator_deadline());
          for (Bytes& order : orders) order = with_staging(commit_->staging(), order);
          return orders;
        });
    ByteReader reader(answer, "orders of a save");
    staging_name_ = reader.string();
    orders_ = Orders::decode(reader.raw(reader.remaining()));
    if (format_->needs_grid()) take_grids();
  }

  void prepare(const Bring& bring) {
    brought_ = bring();
    check_options(options());
    format_ = options().format ? options().format : torch_dist_format();
    dialect_ = options().dialect ? options().dialect : pytorch_dialect();
  }

  Bytes plan_locally(const StateDict& state) {
    items_ = is_plain(state)
                 ? dialect_->to_items(state, *format_)
                 : dialect_->to_items(drop_nonpersistent(build_factories(state)), *format_);
    format_->check(items_);
    if (by_rule() && format_->needs_grid()) {
      throw Error(ErrorCode::kUnsupported,
                  "the format " + std::string(format_->name()) +
                      " stores regular grids, on which ranks can't agree by rule")
          .with_hint("save with the agreement 'exchange'");
    }
    for (const TensorItem& item : items_.tensors) {
      for (const Piece& piece : item.pieces) {
        if (piece.data.has_data()) continue;
        throw Error(ErrorCode::kInvalidArgument, "a tensor without data can't be saved")
            .with_key(item.key);
      }
    }
    local_ = make_local_plan(items_);
    if (!by_rule() && !is_alone()) note_contents();
    if (by_rule()) return encode_keys(empty_keys());
    return is_alone() ? Bytes() : local_.encode();
  }

  // So that the coordinator can report common objects that are not the same on all ranks.
  void note_contents() {
    for (size_t i = 0; i < items_.objects.size(); ++i) {
      if (!items_.objects[i].common) continue;
      const Value& value = items_.objects[i].value;
      const bool archive = value.kind() == Value::Kind::kPickled && value.as_pickled().archive;
      local_.objects[i].content =
          content_hash(archive ? format_->parse_object(value.as_pickled().bytes) : value);
    }
  }

  // Once in the process for the same keys: a trainer saves the same state many times.
  static void tell_of_differing(const std::vector<DifferingObject>& differing) {
    if (differing.empty()) return;
    constexpr size_t kNamed = 10;
    std::string text =
        "values or objects that are not the same on all ranks are saved as the "
        "lowest rank has them: ";
    for (size_t i = 0; i < std::min(differing.size(), kNamed); ++i) {
      const DifferingObject& object = differing[i];
      text += (i == 0 ? "\"" : ", \"") + object.key + "\" (ranks " + std::to_string(object.rank) +
              " and " + std::to_string(object.other) + " differ)";
    }
    if (differing.size() > kNamed) {
      text += " and " + std::to_string(differing.size() - kNamed) + " more";
    }
    log_once(LogLevel::kWarning, text + "; give what each rank has of its own a key of its own");
  }

  // A tensor without elements is stored as one empty chunk. No rule says who else has it, so these
  // keys (few, or none) go to the coordinator, and the lowest rank that has one writes it.
  std::vector<std::string> empty_keys() const {
    std::set<std::string> keys;
    for (const PlanChunk& chunk : local_.chunks) {
      const PlanTensor& tensor = local_.tensors[chunk.tensor];
      if (numel(tensor.global_shape) == 0) keys.insert(tensor.key);
    }
    return {keys.begin(), keys.end()};
  }

  static std::vector<Bytes> orders_by_rule(const std::vector<Bytes>& empties,
                                           const std::string& save_id) {
    std::set<std::string> given;
    std::vector<Bytes> encoded;
    for (const Bytes& keys : empties) {
      Orders orders{save_id, true, {}, {}, {}};
      for (std::string& key : decode_keys(keys)) {
        if (given.insert(key).second) orders.empties.push_back(std::move(key));
      }
      encoded.push_back(orders.encode());
    }
    return encoded;
  }

  // What the rule gives this rank, with the empty tensors as the coordinator dealt them.
  Assignment assignment_by_rule() const {
    Assignment mine = plan_save_by_rule(local_, comm_.rank());
    std::erase_if(mine.chunks, [&](uint32_t i) { return local_.chunks[i].box.empty(); });
    std::set<std::string_view> wanted(orders_.empties.begin(), orders_.empties.end());
    for (uint32_t i = 0; i < local_.chunks.size() && !wanted.empty(); ++i) {
      if (wanted.erase(local_.tensors[local_.chunks[i].tensor].key) > 0) mine.chunks.push_back(i);
    }
    std::sort(mine.chunks.begin(), mine.chunks.end());
    return mine;
  }

  std::vector<Bytes> orders_by_exchange(std::vector<Bytes> plans,
                                        const std::string& save_id) const {
    std::vector<std::vector<Dims>> grids(plans.size());
    if (format_->needs_grid()) grids = agree_on_grids(plans);
    if (is_alone()) return {Orders{save_id, false, plan_save_alone(local_), {}, grids[0]}.encode()};
    SavePlanner planner(comm_.size());
    for (size_t rank = 0; rank < plans.size(); ++rank) {
      planner.add_encoded(static_cast<int>(rank), plans[rank]);
      plans[rank] = Bytes();
    }
    std::vector<Bytes> orders;
    for (Assignment& assignment : planner.finish()) {
      std::vector<Dims>& cells = grids[orders.size()];
      orders.push_back(
          Orders{save_id, false, std::move(assignment), {}, std::move(cells)}.encode());
    }
    tell_of_differing(planner.differing_objects());
    return orders;
  }

  std::vector<std::vector<Dims>> agree_on_grids(const std::vector<Bytes>& plans) const {
    if (is_alone()) return plan_grids({&local_, 1});
    std::vector<LocalSavePlan> decoded;
    for (const Bytes& plan : plans) decoded.push_back(LocalSavePlan::decode(plan));
    return plan_grids(decoded);
  }

  // A tensor of several shards is several items of one key.
  void take_grids() {
    if (orders_.grids.size() != local_.tensors.size()) {
      throw Error(ErrorCode::kInternal, "grids of other tensors than the local plan's");
    }
    std::unordered_map<std::string_view, const Dims*> cells;
    for (size_t i = 0; i < orders_.grids.size(); ++i) {
      cells.emplace(local_.tensors[i].key, &orders_.grids[i]);
    }
    for (TensorItem& item : items_.tensors) {
      if (const auto cell = cells.find(item.key); cell != cells.end()) {
        item.chunk_shape = *cell->second;
      }
    }
  }

  void write() {
    rounds_.run(
        "writing",
        [&](Deadline deadline) {
          if (!staging_name_.empty()) {
            staging_ = staging_storage(brought_.location->storage(), staging_name_);
          }
          if (by_rule()) orders_.assignment = assignment_by_rule();
          if (format_->needs_grid()) leave_out_empty_chunks();
          WriteTask task{&items_,      &local_,      orders_.assignment, by_rule(),
                         comm_.rank(), comm_.size(), orders_.save_id};
          report_ = write_items(storage(), *format_, task, options(), deadline);
          note_result();
          return report_.encode();
        },
        [&](const std::vector<Bytes>& payloads) {
          const auto own = static_cast<size_t>(comm_.rank());
          std::vector<RankReport> reports;
          for (size_t rank = 0; rank < payloads.size(); ++rank) {
            reports.push_back(rank == own ? std::move(report_)
                                          : RankReport::decode(payloads[rank]));
          }
          commit_->prepare(
              {std::move(reports), payloads, options().threads, &items_, options().attributes},
              coordinator_deadline());
          return std::vector<Bytes>();
        });
  }

  // A cell without elements is no file; the index knows the tensor without.
  void leave_out_empty_chunks() {
    std::erase_if(orders_.assignment.chunks,
                  [&](uint32_t i) { return local_.chunks[i].box.empty(); });
  }

  void note_result() {
    result_ = {orders_.save_id, 0, report_.chunks.size() + report_.objects.size()};
    for (const ReportedFile& file : report_.files) {
      result_.bytes_written += file.size;
      written_.push_back(file.name);
    }
  }

  // What the coordinator does for all leaves it time to answer them.
  Deadline coordinator_deadline() const { return deadline_.sooner(kCoordinatorShare); }

  void publish() {
    bool tried = false;
    try {
      rounds_.run_last(
          "preparing to publish", [](Deadline) { return Bytes(); },
          [&](std::vector<Bytes>) {
            // From here on nobody can take the checkpoint back.
            tried = true;
            commit_->publish(coordinator_deadline().without_interrupt());
            return std::vector<Bytes>();
          });
    } catch (...) {
      // The coordinator alone knows that nothing was published.
      if (commit_ && !tried) discard();
      throw;
    }
    if (commit_) commit_->clean();
  }

  void discard() {
    remove_files(storage(), written_);
    if (commit_) commit_->abandon(is_alone());
  }

  const Communicator comm_;
  const Deadline deadline_;
  Rounds rounds_;
  Brought brought_;
  std::shared_ptr<const Format> format_;
  std::shared_ptr<const Dialect> dialect_;
  std::optional<Commit> commit_;  // on the coordinator
  Items items_;
  LocalSavePlan local_;
  Orders orders_;
  RankReport report_;                 // until the coordinator takes its own
  std::string staging_name_;          // of a staged save's directory
  std::shared_ptr<Storage> staging_;  // the same
  SaveResult result_;
  std::vector<std::string> written_;  // files of this rank
};

}  // namespace
}  // namespace engine

SaveResult save(const StateDict& state, const Location& location, const SaveOptions& options) {
  try {
    const Deadline deadline =
        engine::deadline_of(options.timeout).with_interrupt(options.interrupt);
    return engine::Saving(options.comm, location.place(), deadline).run([&] {
      return engine::Brought{&state, &location, &options};
    });
  } catch (...) {
    rethrow_cause();
  }
}

SaveResult save(const std::function<SaveRequest()>& prepare, const std::string& place,
                const Communicator& comm, Deadline deadline) {
  std::optional<SaveRequest> request;
  try {
    return engine::Saving(comm, place, deadline).run([&] {
      request.emplace(prepare());
      return engine::Brought{&request->state, &request->location, &request->options};
    });
  } catch (...) {
    rethrow_cause();
  }
}

}  // namespace tilestone
