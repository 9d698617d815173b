// Saves in separate steps.
#include <unistd.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "python/src/bindings.h"
#include "python/src/requests.h"
#include "tilestone/engine/save_steps_internal.h"
#include "tilestone/engine/session_internal.h"

namespace tilestone::python {
namespace {

using nb::literals::operator""_a;

struct Over {};    // the save has ended
struct InStep {};  // a thread is in a step

// A save between its steps. A thread that begins a step first moves `step_` out, with the GIL held,
// so two threads never have it.
class StepwiseSave {
 public:
  StepwiseSave(int rank, int ranks, Location location)
      : rank_(rank), ranks_(ranks), location_(std::move(location)) {}
  ~StepwiseSave() {
    try {
      give_up();
    } catch (...) {
      // The interpreter is ending, or a signal came: `step_` is destroyed all the same.
    }
  }
  StepwiseSave(const StepwiseSave&) = delete;
  StepwiseSave& operator=(const StepwiseSave&) = delete;

  // All steps of a save share one deadline, which contains the interrupt of all of them.
  Deadline heeding_interrupts(Deadline deadline) const {
    return deadline.with_interrupt(interrupt_);
  }
  void begin(const std::function<PlannedSave()>& plan) {
    run([&] { return plan(); });
    const auto& planned = std::get<PlannedSave>(step_);
    save_id_ = planned.save_id();
    items_ = planned.items();
    bytes_ = planned.bytes();
  }

  void stage() {
    auto planned = take<PlannedSave>("stage");
    run([&] { return std::move(planned).stage(Payload::kStaged); });
  }
  void write() {
    if (std::holds_alternative<PlannedSave>(step_)) {
      auto planned = take<PlannedSave>("write");
      return run([&] { return std::move(planned).stage(Payload::kLive).write(); });
    }
    auto staged = take<StagedSave>("write");
    run([&] { return std::move(staged).write(); });
  }
  void report() {
    auto written = take<WrittenSave>("report");
    run([&] { return std::move(written).report(); });
  }
  SaveResult publish() {
    auto reported = take<ReportedSave>("publish");
    std::optional<SaveResult> result;
    try {
      run([&] {
        result = std::move(reported).publish();
        return Over();
      });
    } catch (const Raised& raised) {
      say_published(raised, result, location_);
      throw;
    }
    return *std::move(result);
  }

  // Does nothing if the save has ended, if a thread is in a step, or in a forked child, because the
  // parent continues the save.
  void give_up() {
    if (std::holds_alternative<Over>(step_) || std::holds_alternative<InStep>(step_)) return;
    auto left = std::make_unique<Step>(std::exchange(step_, Over()));
    if (::getpid() != process_) {
      static_cast<void>(left.release());
      return;
    }
    without_gil([&] { left.reset(); });
  }

  const std::string& save_id() const { return save_id_; }
  uint64_t items() const { return items_; }
  uint64_t bytes() const { return bytes_; }
  std::string next() const {
    if (std::holds_alternative<PlannedSave>(step_)) return "stage or write";
    if (std::holds_alternative<StagedSave>(step_)) return "write";
    if (std::holds_alternative<WrittenSave>(step_)) return "report";
    return std::holds_alternative<ReportedSave>(step_) ? "publish" : "";
  }

 private:
  using Step = std::variant<Over, InStep, PlannedSave, StagedSave, WrittenSave, ReportedSave>;

  template <typename From>
  From take(const std::string& name) {
    if (::getpid() != process_) {
      throw Error(ErrorCode::kUnsupported,
                  name + "() was called in a forked child of the process that began the save");
    }
    if (std::holds_alternative<From>(step_)) {
      From from = std::move(std::get<From>(step_));
      step_ = InStep();
      return from;
    }
    if (std::holds_alternative<InStep>(step_)) {
      throw Error(ErrorCode::kInvalidArgument,
                  name + "() was called while another thread is in a step of this save");
    }
    const std::string expected = next();
    throw Error(ErrorCode::kInvalidArgument,
                name + "() was called, but " +
                    (expected.empty() ? "the save is over" : "the next step is " + expected))
        .with_hint("the steps of a save are stage (optional), write, report and publish");
  }

  // A step that fails ends the save. So does a step that succeeds but during which Python raised.
  template <typename Work>
  void run(const Work& work) {
    step_ = InStep();
    std::optional<Step> next;
    try {
      call_library([&](const auto&) { next.emplace(work()); }, interrupt_);
    } catch (...) {
      step_ = Over();
      if (next) end_after_raising(*std::move(next));
      as_rank(rank_, ranks_, [] { throw; });
    }
    step_ = *std::move(next);
  }

  void end_after_raising(Step next) {
    step_ = std::move(next);
    try {
      give_up();
    } catch (const Raised&) {  // another signal; the first exception is already being raised
    }
  }

  const pid_t process_ = ::getpid();
  const int rank_, ranks_;
  const Location location_;
  const std::shared_ptr<Interrupt> interrupt_ = std::make_shared<Interrupt>();
  Step step_ = Over();
  std::string save_id_;
  uint64_t items_ = 0;
  uint64_t bytes_ = 0;
};

// Python owns the returned object. `session`: null without one; then `options` says how the ranks
// meet.
StepwiseSave* begun(Session* session, const Location& location, const SaveOptions& options,
                    std::pair<int, int> rank_of, Deadline deadline, const MadeSave& made) {
  auto save = std::make_unique<StepwiseSave>(rank_of.first, rank_of.second, location);
  const Deadline end = save->heeding_interrupts(deadline);
  save->begin([&] {
    if (session == nullptr) return engine::begin_in_steps({location, options, end}, view_of(made));
    return engine::OfSession::begin_save(*session, location, options, end, view_of(made));
  });
  return save.release();
}

std::pair<int, int> rank_in(const Session& session) {
  return {session.rank(), session.world_size()};
}

// Like save_state() and save_by_files_state() in engine.cc.
StepwiseSave* begin_save_of(const nb::callable& prepare, const nb::bytes& path, nb::handle comm,
                            double seconds) {
  const Entered entered;
  const Location location(path_of(path));
  const Deadline deadline = end_after(seconds);
  SaveOptions options;
  Session* const session = session_of(comm);
  if (session == nullptr) options.comm = to_communicator(comm);
  const auto rank =
      session != nullptr ? rank_in(*session) : std::pair(options.comm.rank(), options.comm.size());
  const MadeSave made = made_by(prepare);
  return begun(session, location, options, rank, until(deadline, failure_of(made)), made);
}

StepwiseSave* begin_save_by_files_of(const engine::SaveRequest& options,
                                     const nb::callable& prepare, nb::handle session) {
  const Entered entered;
  const ByFiles& files = options.options.by_files.value();
  const Deadline deadline = end_after(options.options.timeout);
  Session* const kept = session_of(session);
  const auto rank = kept != nullptr ? rank_in(*kept) : std::pair(files.rank, files.world_size);
  const MadeSave made = made_by(prepare);
  return begun(kept, options.location, options.options, rank, deadline, made);
}

}  // namespace

void bind_steps(nb::module_& m) {
  nb::class_<StepwiseSave>(m, "StepwiseSave", "A save between its steps.")
      .def_prop_ro("save_id", &StepwiseSave::save_id)
      .def_prop_ro("items", &StepwiseSave::items)
      .def_prop_ro("bytes", &StepwiseSave::bytes)
      .def_prop_ro("next", &StepwiseSave::next, "The next step; empty if the save is over.")
      .def("stage", &StepwiseSave::stage)
      .def("write", &StepwiseSave::write)
      .def("report", &StepwiseSave::report)
      .def("publish", &StepwiseSave::publish)
      .def("give_up", &StepwiseSave::give_up);
  m.def("begin_save", &begin_save_of, "prepare"_a, "path"_a, "comm"_a.none(), "seconds"_a,
        nb::sig("def begin_save(prepare: collections.abc.Callable[[], SaveRequest], path: bytes, "
                "comm: object, seconds: float) -> StepwiseSave"));
  m.def("begin_save_by_files", &begin_save_by_files_of, "options"_a, "prepare"_a,
        "session"_a.none() = nb::none(),
        nb::sig("def begin_save_by_files(options: SaveRequest, prepare: "
                "collections.abc.Callable[[], SaveRequest], session: Session | None = None) -> "
                "StepwiseSave"));
}

}  // namespace tilestone::python
