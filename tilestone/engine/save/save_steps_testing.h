// Saves in steps, for tests.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/engine/save/request_internal.h"
#include "tilestone/engine/save/save_steps_internal.h"
#include "tilestone/engine/session_internal.h"

namespace tilestone {

// A save between two steps. Each step leaves the object empty and returns the save.
class SteppedSave {
 public:
  explicit SteppedSave(std::unique_ptr<engine::SaveInSteps> save) : save_(std::move(save)) {}

  uint64_t bytes() const { return save_->bytes(); }
  SteppedSave stage() { return after(&engine::SaveInSteps::stage, nullptr); }
  SteppedSave write() { return after(&engine::SaveInSteps::write); }
  SteppedSave report() { return after(&engine::SaveInSteps::report); }
  SaveResult publish() {
    const auto save = std::move(save_);
    try {
      return save->publish();
    } catch (...) {
      rethrow_cause();
    }
  }

 private:
  template <typename Step, typename... Args>
  SteppedSave after(Step step, Args... args) {
    auto save = std::move(save_);
    try {
      ((*save).*step)(args...);
    } catch (...) {
      rethrow_cause();
    }
    return SteppedSave(std::move(save));
  }

  std::unique_ptr<engine::SaveInSteps> save_;
};

inline SteppedSave begin_save(const engine::SaveCall& call, const engine::MadeRequest& request) {
  try {
    return SteppedSave(engine::planned_save(call, request));
  } catch (...) {
    rethrow_cause();
  }
}

inline SteppedSave begin_save(const StateDict& state, const Location& location,
                              const SaveOptions& options = {}) {
  return begin_save({location, options, engine::deadline_of(options)},
                    engine::RequestView{&state, &location, &options});
}

// By the session.
inline SteppedSave begin_save(Session& session, const StateDict& state, const Location& location,
                              const SaveOptions& options = {}) {
  const SaveOptions all = engine::OfSession::completed(session, options, location);
  return begin_save({location, all, engine::deadline_of(all), engine::OfSession::parts(session)},
                    engine::RequestView{&state, &location, &all});
}

}  // namespace tilestone
