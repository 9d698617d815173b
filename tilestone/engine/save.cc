#include "tilestone/engine/save.h"

#include <algorithm>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/agreement_internal.h"
#include "tilestone/engine/cleanup_internal.h"
#include "tilestone/engine/commit_internal.h"
#include "tilestone/engine/resources_internal.h"
#include "tilestone/engine/writer_internal.h"
#include "tilestone/format/torch_dist/torch_dist.h"

namespace tilestone {
namespace engine {
namespace {

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

  Bytes encode() const {
    ByteWriter writer;
    writer.string(save_id);
    writer.u8(by_rule ? 1 : 0);
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
    const ByteView rest = reader.raw(reader.remaining());
    if (orders.by_rule) {
      orders.empties = decode_keys(rest);
    } else {
      orders.assignment = Assignment::decode(rest);
    }
    return orders;
  }
};

// One rank's part in one save.
class Saving {
 public:
  Saving(const Location& location, const SaveOptions& options)
      : location_(location),
        options_(options),
        format_(options.format ? options.format : torch_dist_format()),
        rounds_(options.comm, "save", location.describe(), deadline_after(options.timeout)),
        commit_(location.shared(), format_, options.overwrite) {}

  SaveResult run(const StateDict& state) {
    plan(state);
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
  bool is_alone() const { return options_.comm.size() == 1; }
  bool by_rule() const { return options_.agreement == SaveOptions::Agreement::kRule; }

  void plan(const StateDict& state) {
    const Bytes answer = rounds_.run(
        "planning", [&](Deadline) { return plan_locally(state); },
        [&](std::vector<Bytes> plans) {
          commit_.begin();
          return by_rule() ? orders_by_rule(plans) : orders_by_exchange(std::move(plans));
        });
    orders_ = Orders::decode(answer);
  }

  Bytes plan_locally(const StateDict& state) {
    items_ = is_plain(state) ? format_->to_items(state)
                             : format_->to_items(drop_nonpersistent(build_factories(state)));
    for (const TensorItem& item : items_.tensors) {
      for (const Piece& piece : item.pieces) {
        if (piece.data.has_data()) continue;
        throw Error(ErrorCode::kInvalidArgument, "a tensor without data can't be saved")
            .with_key(item.key);
      }
    }
    local_ = make_local_plan(items_);
    if (by_rule()) return encode_keys(empty_keys());
    return is_alone() ? Bytes() : local_.encode();
  }

  // A tensor without elements is stored as one empty chunk. No rule tells who else has it, so these
  // keys (few, or none) go to the coordinator, and the lowest rank that has one writes it.
  std::vector<std::string> empty_keys() const {
    std::set<std::string> keys;
    for (const PlanChunk& chunk : local_.chunks) {
      const PlanTensor& tensor = local_.tensors[chunk.tensor];
      if (numel(tensor.global_shape) == 0) keys.insert(tensor.key);
    }
    return {keys.begin(), keys.end()};
  }

  std::vector<Bytes> orders_by_rule(const std::vector<Bytes>& empties) const {
    std::set<std::string> given;
    std::vector<Bytes> encoded;
    for (const Bytes& keys : empties) {
      Orders orders{commit_.save_id(), true, {}, {}};
      for (std::string& key : decode_keys(keys)) {
        if (given.insert(key).second) orders.empties.push_back(std::move(key));
      }
      encoded.push_back(orders.encode());
    }
    return encoded;
  }

  // What the rule gives this rank, with the empty tensors as the coordinator dealt them.
  Assignment assignment_by_rule() const {
    Assignment mine = plan_save_by_rule(local_, options_.comm.rank());
    std::erase_if(mine.chunks, [&](uint32_t i) { return local_.chunks[i].box.empty(); });
    std::set<std::string_view> wanted(orders_.empties.begin(), orders_.empties.end());
    for (uint32_t i = 0; i < local_.chunks.size() && !wanted.empty(); ++i) {
      if (wanted.erase(local_.tensors[local_.chunks[i].tensor].key) > 0) mine.chunks.push_back(i);
    }
    std::sort(mine.chunks.begin(), mine.chunks.end());
    return mine;
  }

  std::vector<Bytes> orders_by_exchange(std::vector<Bytes> plans) const {
    if (is_alone()) {
      return {Orders{commit_.save_id(), false, plan_save_alone(local_), {}}.encode()};
    }
    SavePlanner planner(options_.comm.size());
    for (size_t rank = 0; rank < plans.size(); ++rank) {
      planner.add_encoded(static_cast<int>(rank), plans[rank]);
      plans[rank] = Bytes();
    }
    std::vector<Bytes> orders;
    for (Assignment& assignment : planner.finish()) {
      orders.push_back(Orders{commit_.save_id(), false, std::move(assignment), {}}.encode());
    }
    return orders;
  }

  void write() {
    rounds_.run(
        "writing",
        [&](Deadline deadline) {
          if (by_rule()) orders_.assignment = assignment_by_rule();
          WriteTask task{&items_,
                         &local_,
                         orders_.assignment,
                         by_rule(),
                         options_.comm.rank(),
                         options_.comm.size(),
                         orders_.save_id};
          report_ = write_items(location_.storage(), *format_, task, options_, deadline);
          note_result();
          deadline_ = deadline;
          return report_.encode();
        },
        [&](const std::vector<Bytes>& payloads) {
          const auto own = static_cast<size_t>(options_.comm.rank());
          std::vector<RankReport> reports;
          for (size_t rank = 0; rank < payloads.size(); ++rank) {
            reports.push_back(rank == own ? std::move(report_)
                                          : RankReport::decode(payloads[rank]));
          }
          commit_.prepare(std::move(reports), payloads, deadline_);
          return std::vector<Bytes>();
        });
  }

  void note_result() {
    result_ = {orders_.save_id, 0, report_.chunks.size() + report_.objects.size()};
    for (const ReportedFile& file : report_.files) {
      result_.bytes_written += file.size;
      written_.push_back(file.name);
    }
  }

  void publish() {
    rounds_.run_last(
        "preparing to publish",
        [&](Deadline deadline) {
          deadline_ = deadline;
          return Bytes();
        },
        [&](std::vector<Bytes>) {
          commit_.publish(deadline_);
          return std::vector<Bytes>();
        });
    if (options_.comm.is_coordinator()) commit_.clean();
  }

  void discard() {
    remove_files(location_.storage(), written_);
    if (options_.comm.is_coordinator()) commit_.abandon();
  }

  const Location& location_;
  const SaveOptions& options_;
  const std::shared_ptr<const Format> format_;
  Rounds rounds_;
  Commit commit_;  // used on the coordinator
  Items items_;
  LocalSavePlan local_;
  Orders orders_;
  RankReport report_;  // until the coordinator takes its own
  SaveResult result_;
  std::vector<std::string> written_;       // files of this rank
  Deadline deadline_ = Deadline::never();  // of the local step of the round under way
};

}  // namespace
}  // namespace engine

SaveResult save(const StateDict& state, const Location& location, const SaveOptions& options) {
  return engine::Saving(location, options).run(state);
}

}  // namespace tilestone
