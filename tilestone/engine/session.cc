#include "tilestone/engine/session.h"

#include <exception>
#include <map>
#include <optional>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/uuid.h"
#include "tilestone/engine/agree.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/engine/save/background_internal.h"
#include "tilestone/engine/save/by_files_internal.h"
#include "tilestone/engine/save/in_background_internal.h"
#include "tilestone/engine/save/planned_internal.h"
#include "tilestone/engine/save/request_internal.h"
#include "tilestone/engine/save/save_steps_internal.h"
#include "tilestone/engine/save/saved_state_internal.h"
#include "tilestone/engine/save/session_parts_internal.h"
#include "tilestone/engine/save/share_internal.h"
#include "tilestone/engine/session_internal.h"

namespace tilestone {
namespace engine {

namespace {

// Rank 0 makes a token from 122 random bits, so every session has a different one.
std::string shared_token(const Communicator& comm, Deadline deadline,
                         const std::optional<Error>& failed) {
  const auto message = [&](int, ByteView) {
    if (failed) throw *failed;
    return Bytes();
  };
  const auto decide = [](int, std::vector<Bytes>) {
    const std::string token = "session " + random_uuid();
    const ByteView bytes = as_bytes(token);
    return Decision{Bytes(bytes.begin(), bytes.end()), true};
  };
  const Bytes token = agree(comm, "session", deadline, message, decide);
  return {reinterpret_cast<const char*>(token.data()), token.size()};
}

// Why no session can have this time limit.
std::optional<Error> failure_of(double timeout) {
  try {
    SaveOptions options;
    options.timeout = timeout;
    check_options(options);
    return std::nullopt;
  } catch (const Error& error) {
    return error;
  }
}

// What the session's last save of such a state assigned to this rank, else what it would write by
// rule.
Assignment likely_assignment(const SessionParts& session, const SaveShare& share) {
  const auto& by_files = share.options.by_files;
  if (by_files && by_files->torch_rank_local) return all_that_is_held(share.local);
  const CachedPlan* const cached = by_files ? nullptr : session.plans.find(structure_of(share));
  return cached != nullptr ? cached->assignment : plan_by_rule(share);
}

}  // namespace
}  // namespace engine

struct Session::Kept {
  std::optional<Communicator> comm;
  int rank = 0;
  int world_size = 1;
  std::string token;
  std::map<std::string, uint64_t> saves;  // by files, so far; by Location::resolved_identity()
  std::shared_ptr<engine::SessionParts> parts = std::make_shared<engine::SessionParts>();
  engine::LastAsync async;
};

Session::Session(const Communicator& comm, double timeout)
    : Session(comm, engine::deadline_of(timeout), engine::failure_of(timeout)) {}

Session::Session(const Communicator& comm, Deadline deadline, const std::optional<Error>& failed)
    : kept_(std::make_unique<Kept>()) {
  try {
    kept_->comm = comm;
    kept_->rank = comm.rank();
    kept_->world_size = comm.size();
    kept_->token = engine::shared_token(comm, deadline, failed);
  } catch (...) {
    // Also if the ranks could not meet.
    if (failed && failed->cause() != nullptr) std::rethrow_exception(failed->cause());
    rethrow_cause();
  }
}

Session::Session(int rank, int world_size, std::string token) : kept_(std::make_unique<Kept>()) {
  SaveOptions options;
  options.by_files = ByFiles{rank, world_size, token};
  engine::check_options(options);
  kept_->rank = rank;
  kept_->world_size = world_size;
  kept_->token = std::move(token);
}

Session::Session(std::unique_ptr<Kept> kept) : kept_(std::move(kept)) {}

Session::~Session() = default;
Session::Session(Session&& other) noexcept = default;
Session& Session::operator=(Session&& other) noexcept = default;

int Session::rank() const { return kept_->rank; }
int Session::world_size() const { return kept_->world_size; }
const std::string& Session::token() const { return kept_->token; }
SessionStats Session::stats() const { return kept_->parts->stats(); }

ByFiles Session::by_files(const Location& location) {
  ByFiles files{kept_->rank, kept_->world_size, kept_->token};
  files.number = kept_->saves[location.resolved_identity()]++;
  return files;
}

SaveOptions Session::completed(const SaveOptions& options, const Location& location) {
  SaveOptions all = options;
  all.comm = Communicator();
  if (!all.by_files && !kept_->comm) all.by_files = by_files(location);
  if (!all.by_files) all.comm = *kept_->comm;
  return all;
}

// Before the session's next save: what is left to report of its last asynchronous one.
void Session::report_earlier(AsyncOptions::InFlight policy, const SaveOptions& options,
                             const Deadline& deadline) {
  if (kept_->parts->take_earlier_reported()) kept_->async.forget();
  const std::optional<engine::EarlierSave> last = kept_->async.last(policy);
  // With a communicator the ranks wait together, once they have met.
  if (!options.by_files) return kept_->parts->set_earlier(last);
  if (last && last->waits) last->durable->wait(deadline);
  const engine::AfterEarlier after = engine::consider({last ? last->look() : engine::InFlight()});
  if (after.way != engine::AfterEarlier::Way::kRefuse) kept_->async.forget();
  if (after.warning) log(LogLevel::kWarning, *after.warning);
  if (after.error) throw *after.error;
}

SaveResult Session::save(const StateDict& state, const Location& location,
                         const SaveOptions& options) {
  const SaveOptions all = completed(options, location);
  return engine::OfSession::save(*this, location, all, engine::deadline_of(all),
                                 engine::RequestView{&state, &location, &all});
}

AsyncSave Session::async_save(const StateDict& state, const Location& location,
                              const SaveOptions& options, const AsyncOptions& async) {
  const SaveOptions all = completed(options, location);
  return engine::OfSession::async_save(*this, location, all, async, engine::deadline_of(all),
                                       engine::RequestView{&state, &location, &all});
}

StateDict Session::load(Wanted wanted, const Location& location, const LoadOptions& options) {
  LoadOptions all = options;
  all.comm = kept_->comm ? *kept_->comm : Communicator();
  return tilestone::load(wanted, location, all);
}

uint64_t Session::prepare(const StateDict& state, const SaveOptions& options,
                          const AsyncOptions& async) {
  engine::SaveShare share;
  engine::set_options(share, options);
  if (!options.by_files && !kept_->comm) {
    share.options.by_files = ByFiles{kept_->rank, kept_->world_size, kept_->token};
  }
  engine::check_options(share.options);
  if (share.options.by_files) engine::refuse_by_files(share);
  share.rank = kept_->rank;
  share.world_size = kept_->world_size;
  share.items = engine::items_of(state, share);
  share.local = make_local_plan(share.items);
  if (options.copies.has_value()) engine::note_contents_of_copied(share);
  share.assignment = engine::likely_assignment(*kept_->parts, share);
  SaveResult unused;
  engine::limit_and_count_copies(share, unused);
  if (async.max_staged_bytes) engine::take_what_exceeds(share, *async.max_staged_bytes);
  const uint64_t bytes = engine::staging_bytes(share.items, share.local, share.assignment);
  auto threads = engine::staging_threads(bytes, options.resources.threads, kept_->parts.get());
  if (threads == nullptr) threads = std::make_shared<ThreadPool>(1);
  const auto memory = kept_->parts->lend_memory();
  memory->reserve(bytes, threads.get());
  memory->pin(engine::pin_for(share.items, share.local, share.assignment), threads.get());
  return bytes;
}

namespace engine {

Session OfSession::make(const Communicator& comm, Deadline deadline,
                        const std::optional<Error>& failed) {
  return {comm, deadline, failed};
}

Session OfSession::of(const Communicator& comm) {
  auto kept = std::make_unique<Session::Kept>();
  kept->comm = comm;
  kept->rank = comm.rank();
  kept->world_size = comm.size();
  return Session(std::move(kept));
}

SaveResult OfSession::save(Session& session, const Location& location, const SaveOptions& options,
                           Deadline deadline, const MadeRequest& request) {
  const SaveOptions all = session.completed(options, location);
  session.report_earlier(AsyncOptions::InFlight::kWait, all, deadline);
  return save_in_a_row({location, all, deadline, session.kept_->parts}, request);
}

std::shared_ptr<SessionParts> OfSession::parts(const Session& session) {
  return session.kept_->parts;
}

AsyncSave OfSession::async_save(Session& session, const Location& location,
                                const SaveOptions& options, const AsyncOptions& async,
                                Deadline deadline, const MadeRequest& request,
                                const std::shared_ptr<LazyStaging>& lazy,
                                const std::shared_ptr<Hold>& hold) {
  try {
    Session::Kept& kept = *session.kept_;
    const SaveOptions all = session.completed(options, location);
    hold == nullptr ? session.report_earlier(async.in_flight, all, deadline)
                    : kept.parts->set_earlier(std::nullopt);
    auto save =
        save_in_background({location, all, deadline, kept.parts, lazy, hold}, async, request);
    if (save->about().skipped || hold != nullptr) return AsyncSave(std::move(save));
    static_cast<void>(kept.parts->take_earlier_reported());
    kept.async.put(save);
    return AsyncSave(std::move(save));
  } catch (...) {
    rethrow_cause();
  }
}

std::string OfSession::difference(Session& session, const Location& location,
                                  const SaveOptions& options, Deadline deadline,
                                  const MadeRequest& request) {
  try {
    const SaveOptions all = session.completed(options, location);
    session.report_earlier(AsyncOptions::InFlight::kWait, all, deadline);
    return difference_from_saved({location, all, deadline, session.kept_->parts}, request);
  } catch (...) {
    rethrow_cause();
  }
}

}  // namespace engine

}  // namespace tilestone
