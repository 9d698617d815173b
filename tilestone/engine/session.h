// Session: what a training run keeps from one save to the next. Saves and loads through it are the
// same as without it.
//
//  - Threads, buffers, and the memory in which payload is staged: memory that is touched for the
//    first time costs several times what a copy to it does.
//  - Plans. With a communicator, ranks that save what they saved before say so instead of sending
//    their plans; when all do, nothing is planned anew. Any rank's other key, shape, dtype, box,
//    replica or object means that all exchange their plans. By rule, and so by files, a rank plans
//    alone, and not again while its own state is the same.
//  - The token, and how many saves went to each location: what names a save by files (ByFiles).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "tilestone/base/deadline.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/engine/load.h"
#include "tilestone/engine/run/location.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/engine/save.h"
#include "tilestone/engine/save_steps.h"
#include "tilestone/state/state_dict.h"

namespace tilestone {

struct Assignment;
struct LocalSavePlan;

namespace engine {
struct SessionParts;
class SaveInSteps;
}  // namespace engine

// Counts of one rank's session.
struct SessionStats {
  uint64_t saves = 0;            // that were planned
  uint64_t plans_exchanged = 0;  // saves for which the ranks sent their plans to rank 0
  // Saves whose plan was that of an earlier one. The others, but for those of which plans were
  // exchanged, this rank has planned by rule.
  uint64_t plans_from_cache = 0;
  uint64_t plan_bytes_sent = 0;  // of this rank's plans, bytes
  friend bool operator==(const SessionStats&, const SessionStats&) = default;
};

// One rank's. Used by one thread at a time; saves that are on their way may outlive it. With a
// communicator all ranks make it, and then their calls, together.
class Session {
 public:
  // Over a communicator. Rank 0 makes the token and sends it to all: the one message that saves by
  // files need. `timeout`: seconds for that, as SaveOptions::timeout. Errors: those of a round, and
  // kInvalidArgument on all ranks where one has no such timeout.
  explicit Session(const Communicator& comm = {}, double timeout = kDefaultTimeout);
  // `check` is called in the round in which the token is sent: what it throws all ranks throw.
  Session(const Communicator& comm, Deadline deadline, const std::function<void()>& check = {});
  // Without one: every save is by files. Errors are those of a save with such ByFiles.
  Session(int rank, int world_size, std::string token);
  ~Session();
  Session(Session&& other) noexcept;
  Session& operator=(Session&& other) noexcept;

  int rank() const;
  int world_size() const;
  const std::string& token() const;
  bool has_communicator() const;

  // As the functions of these names; options.comm is not looked at. Where options.by_files is set,
  // it is taken as it is (see by_files()); a session without a communicator sets it.
  SaveResult save(const StateDict& state, const Location& location,
                  const SaveOptions& options = {});
  PlannedSave begin_save(const StateDict& state, const Location& location,
                         const SaveOptions& options = {});
  StateDict load(const StateDict& wanted, const Location& location, const LoadOptions& options = {},
                 LoadReport* report = nullptr);
  // The same with `prepare`, as the functions of save.h and save_steps.h that have one. `options`
  // says by its by_files, and by what save_by_files() needs of them, how the ranks know of one
  // another: it is completed as above.
  SaveResult save(const Location& location, const SaveOptions& options,
                  const std::function<SaveRequest()>& prepare, Deadline deadline);
  PlannedSave begin_save(const Location& location, const SaveOptions& options,
                         const std::function<SaveRequest()>& prepare, Deadline deadline);

  // For the next save of this session to this location. It counts: ranks that ask equally often for
  // a location, whatever they save elsewhere, name the same save; a save that failed is one, too.
  ByFiles by_files(const Location& location);

  // Makes the memory ready in which PlannedSave::stage() puts such a state, so that the first save
  // takes no longer than the others. Returns its bytes: what this rank wrote when it last saved a
  // state of this structure, else what it would write by rule. Not a call of all ranks.
  uint64_t prepare(const StateDict& state, const SaveOptions& options = {});

  SessionStats stats() const;

 private:
  SaveOptions completed(const SaveOptions& options, const Location& location);
  std::unique_ptr<engine::SaveInSteps> steps_of(const Location& location, const SaveOptions& all,
                                                Deadline deadline);
  Assignment likely_assignment(const LocalSavePlan& plan, const SaveOptions& options,
                               const Format& format, const Dialect& dialect) const;
  struct Kept;
  std::unique_ptr<Kept> kept_;
};

}  // namespace tilestone
