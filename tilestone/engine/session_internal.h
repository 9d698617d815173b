// What the Python binding does with a session beyond its public interface.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "tilestone/base/deadline.h"
#include "tilestone/base/error.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/engine/save/async_save.h"
#include "tilestone/engine/save/hold_internal.h"
#include "tilestone/engine/save/lazy_staging_internal.h"
#include "tilestone/engine/save/request_internal.h"
#include "tilestone/engine/save/save.h"
#include "tilestone/engine/session.h"

namespace tilestone::engine {

struct SessionParts;

struct OfSession {
  // As the session's constructor. A rank whose arguments are invalid passes its error in `failed`,
  // and every rank throws it.
  static Session make(const Communicator& comm, Deadline deadline,
                      const std::optional<Error>& failed);
  // A session whose saves all use `comm`. It has no token, so its ranks need not meet.
  static Session of(const Communicator& comm);
  // `options` with how the session's ranks meet. By files this counts as a save.
  static SaveOptions completed(Session& session, const SaveOptions& options,
                               const Location& location) {
    return session.completed(options, location);
  }
  // As the session's functions of the same names. `options` says how the ranks meet; its by_files
  // is that of the request.
  static SaveResult save(Session& session, const Location& location, const SaveOptions& options,
                         Deadline deadline, const MadeRequest& request);
  // What the session's saves use. For tests, which take a save's steps.
  static std::shared_ptr<SessionParts> parts(const Session& session);
  static AsyncSave async_save(Session& session, const Location& location,
                              const SaveOptions& options, const AsyncOptions& async,
                              Deadline deadline, const MadeRequest& request,
                              const std::shared_ptr<LazyStaging>& lazy = nullptr,
                              const std::shared_ptr<Hold>& hold = nullptr);
  // difference_from_saved() with the checkpoint at `location`.
  static std::string difference(Session& session, const Location& location,
                                const SaveOptions& options, Deadline deadline,
                                const MadeRequest& request);
};

}  // namespace tilestone::engine
