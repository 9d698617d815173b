// A save in its steps, each of which is a call of its own:
//
//   PlannedSave planned = begin_save(state, location, options);
//   StagedSave staged = std::move(planned).stage(Payload::kStaged);   // the state may change now
//   WrittenSave written = std::move(staged).write();
//   ReportedSave reported = std::move(written).report();
//   SaveResult result = std::move(reported).publish();
//
// In a row they are save(): the same files, errors, and rounds of a communicator. None of stage and
// write knows whether a communicator or files (SaveOptions::by_files) coordinate the ranks.
//
// Each step takes over from the one before it, which is empty then: to take a step twice is
// Error(kInvalidArgument). A step that fails ends the save, as a save that fails does. What is
// destroyed before its save has ended gives the save up: the data files that this rank has written
// go, and the other ranks end with Error(kInterrupted) and this rank's number, as after any
// failure. By files that holds until the rank has reported, and such a save can be completed by
// making it again (see ByFiles::token); a reported one needs nothing more of this rank, and whoever
// comes last, or waits, publishes it.
//
// Objects are used by one thread at a time; steps of a save may be taken by different threads. With
// a communicator all ranks take the steps that begin_save, report and publish are together, and
// no other save or load of this process uses the group until the save has ended.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "tilestone/base/deadline.h"
#include "tilestone/engine/run/location.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/engine/save.h"
#include "tilestone/state/state_dict.h"

namespace tilestone {

namespace engine {
class SaveInSteps;
}

// What write() reads tensors from. (A checkpoint's stored chunks, for copies from one checkpoint to
// another, would be one more; a tensor in device memory is fetched as it is staged, or else as it
// is written.)
enum class Payload : uint8_t {
  kLive,    // the caller's memory, which stays and does not change until write() is over
  kStaged,  // a copy, which this save owns: the caller's memory may change, and go
};

// What all steps have in common.
class SaveStep {
 public:
  explicit SaveStep(std::unique_ptr<engine::SaveInSteps> save);
  SaveStep(SaveStep&& other) noexcept;
  SaveStep& operator=(SaveStep&& other) noexcept;  // gives up the save that this had
  ~SaveStep();

  // False once the next step was taken, or after a move.
  bool is_open() const { return save_ != nullptr; }
  // The following are Error(kInvalidArgument) then.
  const std::string& save_id() const;
  // What this rank writes: items (chunks of tensors, and objects, but no copies), and the bytes of
  // the tensors' elements, copies among them. 0 where this rank's part was saved before (by
  // files).
  uint64_t items() const;
  uint64_t bytes() const;

 protected:
  std::unique_ptr<engine::SaveInSteps> take(const char* step);

 private:
  const engine::SaveInSteps& open() const;
  std::unique_ptr<engine::SaveInSteps> save_;
};

// All ranks have reported and, with a communicator, all that they wrote was looked at.
class ReportedSave : public SaveStep {
 public:
  using SaveStep::SaveStep;
  // The checkpoint exists when this returns (see SaveResult::published). Errors: as save().
  SaveResult publish() &&;
};

// This rank's data files are durable, or could not be written; no other rank knows yet.
class WrittenSave : public SaveStep {
 public:
  using SaveStep::SaveStep;
  // Throws what write() failed with on this rank; with a communicator the same Error on every rank
  // when any has failed.
  ReportedSave report() &&;
};

class StagedSave : public SaveStep {
 public:
  using SaveStep::SaveStep;
  // Writes this rank's data files and makes them durable. What fails is kept for report(), which
  // throws it; an interrupt, or what a progress callback throws, may come out of either of the two.
  WrittenSave write() &&;
};

// Who writes what is agreed, and the save has begun at its location. Values and objects are owned,
// tensors are views of the caller's memory.
class PlannedSave : public SaveStep {
 public:
  using SaveStep::SaveStep;
  // With kStaged, copies the tensors that this rank writes, those inside of objects too.
  // Error(kIo) without memory for it, kTimeout past the save's deadline.
  StagedSave stage(Payload payload) &&;
};

// Takes the first step. `state` and `options` may go when this returns, tensors' memory may not.
// options.timeout is for all steps and the time between them. Errors: as save().
PlannedSave begin_save(const StateDict& state, const Location& location,
                       const SaveOptions& options = {});
// The same where making the request may fail, as save() and save_by_files() with `prepare`. The
// request lives until its tensors are staged or written, or the save has ended.
PlannedSave begin_save(const std::function<SaveRequest()>& prepare, const std::string& place,
                       const Communicator& comm, Deadline deadline);
PlannedSave begin_save_by_files(const Location& location, const SaveOptions& options,
                                const std::function<SaveRequest()>& prepare, Deadline deadline);

}  // namespace tilestone
