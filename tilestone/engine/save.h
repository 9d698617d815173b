#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "tilestone/engine/run/options.h"
#include "tilestone/state/state_dict.h"

namespace tilestone {

// Saves the state that the ranks of options.comm hold together. Every rank calls. On return the
// checkpoint is complete and durable. If any rank fails, every rank throws the same Error, which
// names that rank, before the timeout. A checkpoint that was at the location before is then still
// there, and no incomplete file can be taken for a checkpoint.
//
// Protocol (crash argument in transaction.cc):
//  1. Each rank builds factories, drops non-persistent values, and makes its items and its local
//     plan. The coordinator gathers the plans, checks that location and options are equal on all
//     ranks, plans, locks the location, and refuses or accepts the checkpoint that is there. It
//     sends each rank its assignment and the save id.
//  2. Each rank writes new data files, makes them and their directory entries durable, and reports.
//  3. The coordinator opens every reported file, and merges the reports, which checks coverage. It
//     publishes the manifest and then the format's metadata, the latter by one rename: now the
//     checkpoint exists. Every rank gets the result.
//  4. The coordinator removes the files of the replaced checkpoint and those of earlier failed
//     saves.
//
// If the file names of a format do not contain the save id, all of this happens in a directory
// beside the location, and the index is published there. The rename in step 3 is then the rename of
// that directory to the location, or its exchange with the directory at the location.
//
// By files (options.by_files) there is no communicator; the protocol, and what happens in each
// race, is described in commit/attempt.cc. Throws this rank's own errors, or the failure that
// another rank has left. kTimeout names the ranks that have not written by the deadline; the
// written files stay, so that those ranks can complete the save.
SaveResult save(const StateDict& state, const Location& location, const SaveOptions& options = {});

// A save in steps, each of which is a separate call:
//
//   PlannedSave planned = begin_save(state, location, options);
//   StagedSave staged = std::move(planned).stage(Payload::kStaged);   // the state may change now
//   WrittenSave written = std::move(staged).write();
//   ReportedSave reported = std::move(written).report();
//   SaveResult result = std::move(reported).publish();
//
// Together the steps are the same as save(): the same files, errors, and communicator rounds.
// Neither stage nor write depends on whether a communicator or files (SaveOptions::by_files)
// coordinate the ranks.
//
// Each step takes the save over from the previous object, which is empty afterwards. Taking a step
// twice throws Error(kInvalidArgument). A step that fails ends the save, as a failed save() does.
// If an object is destroyed before its save has ended, the save is given up: the data files that
// this rank has written are removed, and the other ranks end with Error(kInterrupted) and this
// rank's number, as after any failure. By files this holds only until the rank has reported. A save
// that was given up can be completed by making it again (see ByFiles::token). A reported save needs
// nothing more from this rank: the last rank to report, or a rank that waits, publishes it.
//
// An object is used by one thread at a time; different threads may take different steps of a save.
// With a communicator all ranks must call begin_save, report and publish together, and no other
// save or load of this process may use the group until the save has ended.

namespace engine {
class SaveInSteps;
}

// What write() reads tensors from. A tensor in device memory is fetched when it is staged or, if it
// is not staged, when it is written.
enum class Payload : uint8_t {
  kLive,    // the caller's memory, which must stay valid and unchanged until write() returns
  kStaged,  // a copy that the save owns; the caller may change or free its memory
};

// The common base of all steps.
class SaveStep {
 public:
  explicit SaveStep(std::unique_ptr<engine::SaveInSteps> save);
  SaveStep(SaveStep&& other) noexcept;
  SaveStep& operator=(SaveStep&& other) noexcept;  // gives up the save that this object had
  ~SaveStep();

  // The following throw Error(kInvalidArgument) after the next step was taken, and after a move.
  const std::string& save_id() const;
  // What this rank writes. items(): chunks of tensors, and objects, without copies. bytes(): the
  // bytes of the tensors' elements, including copies. Both are 0 if this rank's part was already
  // saved before (by files).
  uint64_t items() const;
  uint64_t bytes() const;

 protected:
  std::unique_ptr<engine::SaveInSteps> take(const char* step);

 private:
  const engine::SaveInSteps& open() const;
  std::unique_ptr<engine::SaveInSteps> save_;
};

// With a communicator, all ranks have reported, and the coordinator has checked what they wrote. By
// files, this rank has reported.
class ReportedSave : public SaveStep {
 public:
  using SaveStep::SaveStep;
  // Publishes the checkpoint, which exists when this returns (see SaveResult::published). Throws
  // what save() throws.
  SaveResult publish() &&;
};

// This rank's data files are durable, or could not be written. The other ranks do not know yet.
class WrittenSave : public SaveStep {
 public:
  using SaveStep::SaveStep;
  // Throws the error with which write() failed on this rank. With a communicator, if any rank
  // failed, every rank throws the same Error.
  ReportedSave report() &&;
};

class StagedSave : public SaveStep {
 public:
  using SaveStep::SaveStep;
  // Writes this rank's data files and makes them durable. A failure is kept, and report() throws
  // it. An interrupt, or an exception from a progress callback, may be thrown by either call.
  WrittenSave write() &&;
};

// The ranks have agreed on who writes what, and the save has begun at its location. The save owns
// values and objects; tensors are views of the caller's memory.
class PlannedSave : public SaveStep {
 public:
  using SaveStep::SaveStep;
  // With kStaged, copies the tensors that this rank writes, including those inside objects. Throws
  // Error(kIo) if there is not enough memory, and kTimeout after the save's deadline.
  StagedSave stage(Payload payload) &&;
};

// Takes the first step. `state` and `options` may be destroyed when this returns; the tensors'
// memory must stay valid. options.timeout covers all steps and the time between them. Throws what
// save() throws.
PlannedSave begin_save(const StateDict& state, const Location& location,
                       const SaveOptions& options = {});

}  // namespace tilestone
