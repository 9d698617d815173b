#include "tilestone/engine/save/save.h"

#include <optional>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/engine/save/request_internal.h"
#include "tilestone/engine/save/save_steps_internal.h"

namespace tilestone {
namespace engine {

SaveInSteps::SaveInSteps(const SaveCall& call)
    : deadline_(call.deadline), session_(call.session), saving_(begun(call)) {}

std::unique_ptr<SaveInSteps::Saving> SaveInSteps::begun(const SaveCall& call) {
  if (call.options.by_files) {
    return std::make_unique<Saving>(std::in_place_type<SavingByFiles>, call.location, call.options,
                                    call.deadline);
  }
  return std::make_unique<Saving>(std::in_place_type<SavingByRounds>, call.options.comm, "save",
                                  call.location.identity_or_empty(), call.deadline);
}

SaveInSteps::~SaveInSteps() {
  if (is_over_) return;
  give_up(
      Error(ErrorCode::kInterrupted, std::string("a rank gave up the save before it was ") + next_)
          .with_rank(share().rank));
}

PlannedShare& SaveInSteps::planned() const {
  return std::visit([](auto& saving) -> PlannedShare& { return saving.planned; }, *saving_);
}

void SaveInSteps::give_up(const Error& why) noexcept {
  std::visit([&](auto& saving) { give_up_save(saving, why); }, *saving_);
}

// Runs a step. If the step throws, the save has ended.
void SaveInSteps::run_step(const std::function<void()>& step) {
  try {
    step();
  } catch (...) {
    is_over_ = true;
    throw;
  }
}

void SaveInSteps::plan(const MadeRequest& request) {
  run_step([&] {
    std::visit([&](auto& saving) { plan_step(saving, request, session_.get()); }, *saving_);
  });
  note_planned(planned(), began_, preparing_of(request));
  if (session_) session_->count({1, 0, 0, 0});
  next_ = "written";
}

void SaveInSteps::stage(const std::shared_ptr<LazyStaging>& lazy) {
  run_step([&] {
    try {
      const auto began = StepTimes::Clock::now();
      memory_ = stage_share(planned(), session_.get(), deadline_, lazy);
      planned().steps.add("staging", began);
    } catch (...) {
      give_up(current_error());
      throw;
    }
  });
}

void SaveInSteps::write() {
  run_step([&] { std::visit([&](auto& saving) { write_step(saving, kept()); }, *saving_); });
  // Neither the caller's memory nor the staging memory is needed any more.
  release_tensors(planned().share);
  memory_.reset();
  next_ = "reported";
}

void SaveInSteps::report() {
  const auto began = StepTimes::Clock::now();
  run_step([&] { std::visit([](auto& saving) { report_step(saving); }, *saving_); });
  planned().steps.add("reporting", began);
  next_ = "published";
}

SaveResult SaveInSteps::publish() {
  std::optional<SaveResult> result;
  const auto began = StepTimes::Clock::now();
  run_step([&] { std::visit([&](auto& saving) { result = publish_step(saving); }, *saving_); });
  is_over_ = true;
  note_published(planned(), began, *result);
  return *std::move(result);
}

std::unique_ptr<SaveInSteps> planned_save(const SaveCall& call, const MadeRequest& request) {
  std::unique_ptr<SaveInSteps> save;
  try {
    save = std::make_unique<SaveInSteps>(call);
  } catch (...) {
    expect_made(request);
    throw;
  }
  save->plan(request);
  return save;
}

SaveResult save_in_a_row(const SaveCall& call, const MadeRequest& request) {
  try {
    const auto save = planned_save(call, request);
    save->write();
    save->report();
    return save->publish();
  } catch (...) {
    rethrow_cause();
  }
}

}  // namespace engine

SaveResult save(const StateDict& state, const Location& location, const SaveOptions& options) {
  return engine::save_in_a_row({location, options, engine::deadline_of(options)},
                               engine::RequestView{&state, &location, &options});
}

}  // namespace tilestone
