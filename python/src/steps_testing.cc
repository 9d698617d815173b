// Saves in separate steps, for the tests of the Python package.
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "python/src/bindings.h"
#include "python/src/requests.h"
#include "tilestone/engine/save/save_steps_internal.h"
#include "tilestone/engine/session_internal.h"

namespace tilestone::python {
namespace {

using nb::literals::operator""_a;

// A save between its steps, which are taken once, in their order, by one thread at a time.
// give_up() may come from another one.
class StepwiseSave {
 public:
  StepwiseSave(int rank, int ranks, Location location)
      : rank_(rank), ranks_(ranks), location_(std::move(location)) {}
  ~StepwiseSave() {
    try {
      give_up();
    } catch (...) {
      // The interpreter is ending, or a signal came: `save_` is destroyed all the same.
    }
  }
  StepwiseSave(const StepwiseSave&) = delete;
  StepwiseSave& operator=(const StepwiseSave&) = delete;

  // All steps of a save share one deadline, which contains the interrupt of all of them.
  Deadline heeding_interrupts(Deadline deadline) const {
    return deadline.with_interrupt(interrupt_);
  }
  void begin(const std::function<std::unique_ptr<engine::SaveInSteps>()>& plan) {
    run([&] { save_ = plan(); });
    save_id_ = save_->share().save_id;
  }

  void stage() {
    take([&] { save_->stage(nullptr); });
  }
  void write() {
    take([&] { save_->write(); });
  }
  void report() {
    take([&] { save_->report(); });
  }
  SaveResult publish() {
    std::optional<SaveResult> result;
    try {
      take([&] {
        result = save_->publish();
        save_.reset();
      });
    } catch (const Raised& raised) {
      say_published(raised, result, location_);
      throw;
    }
    return *std::move(result);
  }

  // Does nothing if the save has ended, or if a thread is in a step.
  void give_up() {
    if (in_step_) return;
    std::unique_ptr<engine::SaveInSteps> left = std::move(save_);
    if (left == nullptr) return;
    without_gil([&] { left.reset(); });
  }

  const std::string& save_id() const { return save_id_; }
  bool is_over() const { return save_ == nullptr; }

 private:
  void take(const std::function<void()>& step) {
    if (is_over()) throw Error(ErrorCode::kInvalidArgument, "the save is over");
    run(step);
  }

  // A step that fails ends the save. So does a step that succeeds but during which Python raised.
  void run(const std::function<void()>& step) {
    in_step_ = true;
    try {
      call_library(
          [&](const auto&) {
            try {
              step();
            } catch (...) {
              rethrow_cause();
            }
          },
          interrupt_);
    } catch (...) {
      in_step_ = false;
      try {
        give_up();
      } catch (const Raised&) {  // another signal; the first exception is already being raised
      }
      as_rank(rank_, ranks_, [] { throw; });
    }
    in_step_ = false;
  }

  const int rank_, ranks_;
  const Location location_;
  const std::shared_ptr<Interrupt> interrupt_ = std::make_shared<Interrupt>();
  std::unique_ptr<engine::SaveInSteps> save_;  // null: not begun, or over
  bool in_step_ = false;
  std::string save_id_;
};

StepwiseSave* begin_save(const MakesSave& prepare, const nb::bytes& path, nb::handle comm,
                         double seconds, const engine::SaveRequest* bare) {
  const Entered entered;
  const SaveStart start = start_of(prepare, path, comm, seconds, bare);
  auto save = std::make_unique<StepwiseSave>(start.rank, start.ranks, start.location);
  const Deadline end = save->heeding_interrupts(start.deadline);
  save->begin([&] {
    SaveOptions options = start.options;
    std::shared_ptr<engine::SessionParts> parts;
    if (start.session != nullptr) {
      options = engine::OfSession::completed(*start.session, options, start.location);
      parts = engine::OfSession::parts(*start.session);
    }
    return engine::planned_save({start.location, options, end, parts}, view_of(start.made));
  });
  return save.release();
}

}  // namespace

void bind_steps(nb::module_& m) {
  nb::class_<StepwiseSave>(m, "_StepwiseSave", "A save between its steps.")
      .def_prop_ro("save_id", &StepwiseSave::save_id)
      .def_prop_ro("is_over", &StepwiseSave::is_over)
      .def("stage", &StepwiseSave::stage)
      .def("write", &StepwiseSave::write)
      .def("report", &StepwiseSave::report)
      .def("publish", &StepwiseSave::publish)
      .def("give_up", &StepwiseSave::give_up);
  m.def("_begin_save", &begin_save, "prepare"_a, "path"_a, "comm"_a.none(), "seconds"_a,
        "bare"_a.none());
}

}  // namespace tilestone::python
