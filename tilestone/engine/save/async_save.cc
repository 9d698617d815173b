#include "tilestone/engine/save/async_save.h"

#include <optional>
#include <string>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/engine/run/terms_internal.h"
#include "tilestone/engine/save/background_internal.h"
#include "tilestone/engine/save/by_rounds_internal.h"
#include "tilestone/engine/save/in_background_internal.h"
#include "tilestone/engine/save/on_hosts_internal.h"
#include "tilestone/engine/save/planned_internal.h"

namespace tilestone {
namespace engine {
namespace {

// Lets an interrupt follow that of the call while this exists.
class DuringCall {
 public:
  DuringCall(std::shared_ptr<Interrupt> own, const Deadline& deadline) : own_(std::move(own)) {
    own_->follow(deadline.interrupt());
  }
  ~DuringCall() { own_->follow(nullptr); }
  DuringCall(const DuringCall&) = delete;
  DuringCall& operator=(const DuringCall&) = delete;

 private:
  const std::shared_ptr<Interrupt> own_;
};

// Whether the error is a failure of the storage or of another rank, which a program that saves with
// OnError::kWarn survives.
bool is_survived(const Error& error) {
  return error.cause() == nullptr &&
         (error.code() == ErrorCode::kIo || error.code() == ErrorCode::kNotFound ||
          error.code() == ErrorCode::kTimeout || error.code() == ErrorCode::kRankFailed);
}

std::string text_of(const Location& location) { return location.storage().describe(); }

Background::About about_of(const SaveShare& share, const Location& location,
                           const AsyncOptions& async) {
  return {share.save_id, text_of(location), share.bytes(), async.on_error, false};
}

Terms terms_of(const AsyncOptions& async) {
  static constexpr const char* kOnError[] = {"\"raise\"", "\"warn\""};
  static constexpr const char* kInFlight[] = {"\"wait\"", "\"fail\"", "\"skip\""};
  return {{"on_error", kOnError[static_cast<size_t>(async.on_error)]},
          {"in_flight", kInFlight[static_cast<size_t>(async.in_flight)]}};
}

// By files one rank can take every step alone.
std::shared_ptr<Background> by_files(const SaveCall& call, const AsyncOptions& async,
                                     const Deadline& deadline, const MadeRequest& request,
                                     std::shared_ptr<Interrupt> interrupt) {
  auto save = std::make_unique<SaveInSteps>(call);
  save->plan(request);
  save->stage(call.lazy);
  auto background = std::make_shared<Background>(about_of(save->share(), call.location, async),
                                                 deadline, std::move(interrupt));
  const auto begun = std::make_shared<std::unique_ptr<SaveInSteps>>(std::move(save));
  background->start({[begun, hold = call.hold, deadline = call.deadline] {
                       // Destroyed before the outcome is known: see Background::Work.
                       const std::unique_ptr<SaveInSteps> own = std::move(*begun);
                       own->write();
                       if (hold != nullptr) hold->pass(deadline);
                       own->report();
                       return own->publish();
                     },
                     {},
                     call.lazy});
  return background;
}

std::shared_ptr<Background> by_rounds(const SaveCall& call, const AsyncOptions& async,
                                      const Deadline& deadline, const MadeRequest& request,
                                      const std::shared_ptr<Interrupt>& interrupt) {
  const auto began = StepTimes::Clock::now();
  // Not "save": after they have planned, ranks that save meet in other ways.
  SavingByRounds saving(call.options.comm, "async_save", call.location.identity_or_empty(),
                        call.deadline);
  const auto hosts = hosts_of(request);
  saving.publishes = hosts == nullptr;
  Terms terms = terms_of(async);
  terms.emplace_back("where it is saved first", hosts != nullptr ? "the hosts" : "the location");
  const bool is_held = call.hold != nullptr;
  terms.emplace_back("when it is published", is_held ? "once it is finalized" : "once written");
  plan_step(saving, request, call.session.get(), terms);
  if (hosts != nullptr) save_on(hosts, saving.planned);
  note_planned(saving.planned, began, preparing_of(request));
  if (call.session != nullptr) call.session->count({1, 0, 0, 0});
  auto background = std::make_shared<Background>(
      about_of(saving.planned.share, call.location, async), deadline, interrupt);
  StagedShare staged = stage_by_rounds(saving.rounds, std::move(saving.planned),
                                       async.max_staged_bytes, call.session.get(), call.lazy);
  // A rank has left during the last round. No other round follows in which this rank would fail.
  const std::optional<Error> undelivered = saving.rounds.undelivered();
  if (hosts != nullptr) {
    if (undelivered) {
      discard(staged.planned);
      throw *undelivered;
    }
    const auto save = std::make_shared<OnHosts>(std::move(staged), call.session, call.deadline);
    background->start({[save] { return save->save(); }, {}, call.lazy});
    return background;
  }
  const auto save =
      std::make_shared<InBackground>(std::move(staged), call.session, call.deadline, call.hold);
  try {
    if (undelivered) throw *undelivered;
    background->start({[save] { return save->save(); }, [save] { save->tidy(); }, call.lazy});
  } catch (...) {
    save->give_up(current_error());
    throw;
  }
  return background;
}

// A save that has ended in its call. `failure`: it was logged; null: the save was skipped.
std::shared_ptr<Background> ended_save(const Location& location, const AsyncOptions& async,
                                       std::exception_ptr failure) {
  const bool is_skipped = failure == nullptr;
  auto save = std::make_shared<Background>(
      Background::About{"", text_of(location), 0, async.on_error, is_skipped}, Deadline::never(),
      std::make_shared<Interrupt>());
  SaveResult result;
  result.published = !is_skipped;
  save->end(std::move(failure), result);
  static_cast<void>(save->durable_state().failure(true));
  return save;
}

// What is not checked inside a round. Fails alike on all ranks.
void check(const SaveOptions& options, const AsyncOptions& async) {
  if (!options.by_files) return;
  if (async.in_flight == AsyncOptions::InFlight::kSkip) {
    throw Error(ErrorCode::kUnsupported,
                "in_flight = skip needs a communicator: by files the ranks "
                "can't agree to skip a save")
        .with_hint("use wait or fail");
  }
  if (async.max_staged_bytes) {
    throw Error(ErrorCode::kUnsupported, "max_staged_bytes needs a communicator")
        .with_hint("save with a communicator, or without max_staged_bytes");
  }
}

}  // namespace

std::shared_ptr<Background> save_in_background(const SaveCall& given, const AsyncOptions& async,
                                               const MadeRequest& request) {
  check(given.options, async);
  const auto interrupt = std::make_shared<Interrupt>();
  const DuringCall during(interrupt, given.deadline);
  const SaveCall call{given.location, given.options, given.deadline.with_interrupt(interrupt),
                      given.session,  given.lazy,    given.hold};
  try {
    auto save = given.options.by_files ? by_files(call, async, given.deadline, request, interrupt)
                                       : by_rounds(call, async, given.deadline, request, interrupt);
    if (call.lazy == nullptr || call.lazy->is_sealed()) save->note_staged();
    return save;
  } catch (const SkippedSave&) {
    return ended_save(given.location, async, nullptr);
  } catch (const Error& error) {
    if (async.on_error != AsyncOptions::OnError::kWarn || !is_survived(error)) throw;
    log(LogLevel::kWarning, std::string("an asynchronous save has failed, and the program goes on "
                                        "because of on_error = warn: ") +
                                error.what());
    return ended_save(given.location, async, std::make_exception_ptr(error));
  }
}

}  // namespace engine

AsyncSave async_save(const StateDict& state, const Location& location, const SaveOptions& options,
                     const AsyncOptions& async) {
  try {
    return AsyncSave(engine::save_in_background({location, options, engine::deadline_of(options)},
                                                async,
                                                engine::RequestView{&state, &location, &options}));
  } catch (...) {
    rethrow_cause();
  }
}

}  // namespace tilestone
