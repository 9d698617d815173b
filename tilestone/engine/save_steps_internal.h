// The steps of a save over any coordination.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "tilestone/engine/coordination_internal.h"
#include "tilestone/engine/save_steps.h"
#include "tilestone/engine/write/stage_internal.h"

namespace tilestone::engine {

// One save on its way. Gives the save up when it goes before the save has ended. In a child of fork
// it is the parent's: each step is Error(kUnsupported), and its end changes nothing.
class SaveInSteps {
 public:
  // `session`, which may be null: whose threads and memory are used.
  explicit SaveInSteps(std::unique_ptr<Coordination> coordination,
                       std::shared_ptr<SessionParts> session = nullptr);
  ~SaveInSteps();
  SaveInSteps(const SaveInSteps&) = delete;
  SaveInSteps& operator=(const SaveInSteps&) = delete;

  // Each once, in this order; stage() may be left out.
  void plan(const Bring& bring);
  void stage();
  void write();
  void report();
  SaveResult publish();

  const SaveShare& share() const { return coordination_->share(); }
  // What must live until the payload is staged or written, or the save has ended.
  void keep(std::shared_ptr<const void> kept) { kept_ = std::move(kept); }

 private:
  void take(const std::function<void()>& step);
  bool is_in_child() const;
  void stage_share();
  void let_go_of_tensors();

  const int process_;  // that has begun it
  std::unique_ptr<Coordination> coordination_;
  std::shared_ptr<SessionParts> session_;
  std::shared_ptr<const void> kept_;
  std::shared_ptr<StagingMemory> memory_;
  const char* next_ = "planned";  // in the words of an error: "before it was planned"
  bool is_over_ = false;
};

// The threads that copy `bytes` beside the calling one, `option` being SaveOptions::threads; the
// session's where there is one (else null). Null where the calling thread does it faster alone.
std::shared_ptr<ThreadPool> staging_threads(uint64_t bytes, int option, SessionParts* session);

// Over the coordination that the options ask for, by the options' deadline.
std::unique_ptr<SaveInSteps> steps_of(const Location& location, const SaveOptions& options,
                                      const std::shared_ptr<SessionParts>& session = nullptr);
SaveResult save_in_a_row(SaveInSteps& save, const Bring& bring);
// Plans what `prepare` gives, and keeps it as begin_save() with `prepare` says.
PlannedSave planned_by_request(std::unique_ptr<SaveInSteps> save,
                               const std::function<SaveRequest()>& prepare);

}  // namespace tilestone::engine
