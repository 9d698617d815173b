#include "tilestone/engine/save_steps.h"

#include <unistd.h>

#include <optional>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/thread_pool.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/engine/run/resources_internal.h"
#include "tilestone/engine/save_steps_internal.h"
#include "tilestone/engine/session_parts_internal.h"
#include "tilestone/engine/write/writer_internal.h"

namespace tilestone {
namespace engine {
namespace {

// Below this, starting threads does not pay off.
constexpr uint64_t kMinBytesForThreads = 16u << 20;

RankReport write_share(const SaveShare& share, const WritePlace& place, SessionParts* session) {
  WriteTask task{&share.items, &share.local,     share.assignment, share.report_held,
                 share.rank,   share.world_size, share.save_id,    place.first_file};
  if (session != nullptr) task.kept = &session->resources;
  return write_items(*place.storage, *share.format, task, share.options, place.deadline);
}

}  // namespace

std::shared_ptr<ThreadPool> staging_threads(uint64_t bytes, int option, SessionParts* session) {
  const size_t count = thread_count(option);
  if (bytes < kMinBytesForThreads || count == 1) return nullptr;
  if (session != nullptr) return session->resources.threads(count);
  return std::make_shared<ThreadPool>(count);
}

SaveInSteps::SaveInSteps(std::unique_ptr<Coordination> coordination)
    : process_(::getpid()), coordination_(std::move(coordination)) {}

SaveInSteps::~SaveInSteps() {
  if (is_in_child()) {
    // Its locks, messages and threads belong to the parent, so the child must not end any of them.
    static_cast<void>(coordination_.release());
    return;
  }
  if (is_over_) return;
  coordination_->give_up(
      Error(ErrorCode::kInterrupted, std::string("a rank gave up the save before it was ") + next_)
          .with_rank(share().rank));
}

bool SaveInSteps::is_in_child() const { return ::getpid() != process_; }

// Runs a step. If the step throws, the save has ended.
void SaveInSteps::take(const std::function<void()>& step) {
  if (is_in_child()) {
    throw Error(ErrorCode::kUnsupported,
                "a child process can't continue a save that its parent has begun")
        .with_rank(share().rank)
        .with_hint("continue the save in the parent; begin a new save in the child");
  }
  try {
    step();
  } catch (...) {
    is_over_ = true;
    throw;
  }
}

void SaveInSteps::plan(const Bring& bring) {
  take([&] { coordination_->plan(bring); });
  brought_by_ = bring;
  if (SessionParts* const session = coordination_->session()) session->count({1, 0, 0, 0});
  next_ = "written";
}

void SaveInSteps::stage() {
  take([] {});
  try {
    stage_share();
  } catch (...) {
    is_over_ = true;
    coordination_->give_up(current_error());
    throw;
  }
  brought_by_ = nullptr;
}

void SaveInSteps::stage_share() {
  SaveShare& share = coordination_->share();
  SessionParts* const session = coordination_->session();
  const uint64_t bytes = staging_bytes(share.items, share.local, share.assignment);
  const auto threads = staging_threads(bytes, share.options.resources.threads, session);
  memory_ = session != nullptr ? session->lend_memory() : std::make_shared<StagingMemory>();
  memory_->reserve(bytes, nullptr);
  stage_tensors(share.items, share.local, share.assignment, *memory_, threads.get(),
                coordination_->deadline());
  for (const auto* objects : {&share.assignment.objects, &share.assignment.object_copies}) {
    for (const uint32_t i : *objects) {
      Value& value = share.items.objects[i].value;
      value = own_tensors(value);
    }
  }
  if (share.items.common) share.items.common = own_tensors(*share.items.common);
}

void SaveInSteps::write() {
  take([&] {
    coordination_->write([&](const WritePlace& place) {
      return write_share(share(), place, coordination_->session());
    });
  });
  release_tensors();
  next_ = "reported";
}

// Releases the tensors: durable data is not read again, so neither the caller's memory nor the
// staging memory is needed.
void SaveInSteps::release_tensors() {
  for (TensorItem& item : coordination_->share().items.tensors) {
    for (Piece& piece : item.pieces) {
      piece.data = TensorView::without_data(piece.data.dtype, piece.data.shape);
    }
  }
  brought_by_ = nullptr;
  memory_.reset();
}

void SaveInSteps::report() {
  take([&] { coordination_->report(); });
  next_ = "published";
}

SaveResult SaveInSteps::publish() {
  std::optional<SaveResult> result;
  take([&] { result = coordination_->publish(); });
  is_over_ = true;
  return *std::move(result);
}

Bring bring_request(const std::function<SaveRequest()>& prepare) {
  const auto request = std::make_shared<std::optional<SaveRequest>>();
  return [request, &prepare] {
    const SaveRequest& made = request->emplace(prepare());
    const auto& compared = made.compared_common;
    return Brought{&made.state, &made.location, &made.options, compared ? &*compared : nullptr};
  };
}

std::unique_ptr<Coordination> coordinate(const Location& location, const SaveOptions& options,
                                         Deadline deadline, std::shared_ptr<SessionParts> session) {
  return options.by_files
             ? coordinate_by_files(location, options, deadline, std::move(session))
             : coordinate_by_rounds(options.comm, location.place(), deadline, std::move(session));
}

PlannedSave begin_in_steps(std::unique_ptr<Coordination> coordination, const Bring& bring) {
  auto save = std::make_unique<SaveInSteps>(std::move(coordination));
  save->plan(bring);
  return PlannedSave(std::move(save));
}

SaveResult save_in_a_row(std::unique_ptr<Coordination> coordination, const Bring& bring) {
  SaveInSteps save(std::move(coordination));
  save.plan(bring);
  save.write();
  save.report();
  return save.publish();
}

}  // namespace engine

using engine::SaveInSteps;

SaveStep::SaveStep(std::unique_ptr<SaveInSteps> save) : save_(std::move(save)) {}
SaveStep::SaveStep(SaveStep&& other) noexcept = default;
SaveStep& SaveStep::operator=(SaveStep&& other) noexcept = default;
SaveStep::~SaveStep() = default;

const SaveInSteps& SaveStep::open() const {
  if (save_ != nullptr) return *save_;
  throw Error(ErrorCode::kInvalidArgument,
              "this step of the save is over: the next step was already taken");
}

const std::string& SaveStep::save_id() const { return open().share().save_id; }
uint64_t SaveStep::bytes() const { return open().share().bytes(); }
uint64_t SaveStep::items() const {
  const Assignment& mine = open().share().assignment;
  return mine.chunks.size() + mine.objects.size();
}

std::unique_ptr<SaveInSteps> SaveStep::take(const char* step) {
  if (save_ != nullptr) return std::move(save_);
  throw Error(ErrorCode::kInvalidArgument,
              std::string(step) + " was called on a step of the save that was already taken")
      .with_hint("call each step once, on the object that the previous step returned");
}

StagedSave PlannedSave::stage(Payload payload) && {
  auto save = take("stage");
  try {
    if (payload == Payload::kStaged) save->stage();
  } catch (...) {
    rethrow_cause();
  }
  return StagedSave(std::move(save));
}

WrittenSave StagedSave::write() && {
  auto save = take("write");
  try {
    save->write();
  } catch (...) {
    rethrow_cause();
  }
  return WrittenSave(std::move(save));
}

ReportedSave WrittenSave::report() && {
  auto save = take("report");
  try {
    save->report();
  } catch (...) {
    rethrow_cause();
  }
  return ReportedSave(std::move(save));
}

SaveResult ReportedSave::publish() && {
  const auto save = take("publish");
  try {
    return save->publish();
  } catch (...) {
    rethrow_cause();
  }
}

PlannedSave begin_save(const StateDict& state, const Location& location,
                       const SaveOptions& options) {
  try {
    return engine::begin_in_steps(
        engine::coordinate(location, options, engine::deadline_of(options)),
        [&] { return engine::Brought{&state, &location, &options}; });
  } catch (...) {
    rethrow_cause();
  }
}

PlannedSave begin_save(const std::function<SaveRequest()>& prepare, const std::string& place,
                       const Communicator& comm, Deadline deadline) {
  try {
    return engine::begin_in_steps(engine::coordinate_by_rounds(comm, place, deadline),
                                  engine::bring_request(prepare));
  } catch (...) {
    rethrow_cause();
  }
}

PlannedSave begin_save_by_files(const Location& location, const SaveOptions& options,
                                const std::function<SaveRequest()>& prepare, Deadline deadline) {
  try {
    return engine::begin_in_steps(engine::coordinate_by_files(location, options, deadline),
                                  engine::bring_request(prepare));
  } catch (...) {
    rethrow_cause();
  }
}

}  // namespace tilestone
