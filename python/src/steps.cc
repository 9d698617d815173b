// Saves in separate steps.
#include <unistd.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "python/src/bindings.h"
#include "python/src/requests.h"
#include "tilestone/engine/save/save_steps_internal.h"
#include "tilestone/engine/session_internal.h"

namespace tilestone::python {
namespace {

using nb::literals::operator""_a;

// A save between its steps. A thread that begins a step says so first, with the GIL held, so two
// threads are never in one.
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
    run(kStageOrWrite, [&] { save_ = plan(); });
    save_id_ = save_->share().save_id;
    items_ = save_->items();
    bytes_ = save_->bytes();
  }

  void stage() {
    check_next("stage");
    run("write", [&] { save_->stage(nullptr); });
  }
  void write() {
    check_next("write");
    run("report", [&] { save_->write(); });
  }
  void report() {
    check_next("report");
    run("publish", [&] { save_->report(); });
  }
  SaveResult publish() {
    check_next("publish");
    std::optional<SaveResult> result;
    try {
      run("", [&] {
        result = save_->publish();
        save_.reset();
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
    if (in_step_) return;
    next_ = "";
    std::unique_ptr<engine::SaveInSteps> left = std::move(save_);
    if (left == nullptr) return;
    if (::getpid() != process_) {
      static_cast<void>(left.release());
      return;
    }
    without_gil([&] { left.reset(); });
  }

  const std::string& save_id() const { return save_id_; }
  uint64_t items() const { return items_; }
  uint64_t bytes() const { return bytes_; }
  std::string next() const { return std::string(next_); }

 private:
  static constexpr std::string_view kStageOrWrite = "stage or write";

  void check_next(const std::string& name) const {
    if (::getpid() != process_) {
      throw Error(ErrorCode::kUnsupported,
                  name + "() was called in a forked child of the process that began the save");
    }
    if (in_step_) {
      throw Error(ErrorCode::kInvalidArgument,
                  name + "() was called while another thread is in a step of this save");
    }
    if (next_ == name || (next_ == kStageOrWrite && (name == "stage" || name == "write"))) return;
    throw Error(ErrorCode::kInvalidArgument,
                name + "() was called, but " +
                    (next_.empty() ? "the save is over" : "the next step is " + std::string(next_)))
        .with_hint("the steps of a save are stage (optional), write, report and publish");
  }

  // A step that fails ends the save. So does a step that succeeds but during which Python raised.
  void run(std::string_view after, const std::function<void()>& step) {
    in_step_ = true;
    next_ = "";
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
    next_ = after;
  }

  const pid_t process_ = ::getpid();
  const int rank_, ranks_;
  const Location location_;
  const std::shared_ptr<Interrupt> interrupt_ = std::make_shared<Interrupt>();
  std::unique_ptr<engine::SaveInSteps> save_;  // null: not begun, or over
  std::string_view next_;
  bool in_step_ = false;
  std::string save_id_;
  uint64_t items_ = 0;
  uint64_t bytes_ = 0;
};

StepwiseSave* begin_save(const MakesSave& prepare, const nb::bytes& path, nb::handle comm,
                         double seconds, const engine::SaveRequest* bare) {
  const Entered entered;
  const SaveStart start = start_of(prepare, path, comm, seconds, bare);
  auto save = std::make_unique<StepwiseSave>(start.rank, start.ranks, start.location);
  const Deadline end = save->heeding_interrupts(start.deadline);
  save->begin([&] {
    const engine::MadeRequest request = view_of(start.made);
    if (start.session == nullptr) {
      return engine::begin_in_steps({start.location, start.options, end}, request);
    }
    return engine::OfSession::begin_save(*start.session, start.location, start.options, end,
                                         request);
  });
  return save.release();
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
  m.def("begin_save", &begin_save, "prepare"_a, "path"_a, "comm"_a.none(), "seconds"_a,
        "bare"_a.none());
}

}  // namespace tilestone::python
