// The start of a save in the background.
#pragma once

#include <memory>

#include "tilestone/engine/save/async_save.h"
#include "tilestone/engine/save/background_internal.h"
#include "tilestone/engine/save/request_internal.h"
#include "tilestone/engine/save/save_steps_internal.h"

namespace tilestone::engine {

// What the Python binding does with a save beyond its public interface.
struct OfAsyncSave {
  // Background::seal().
  static void seal(const AsyncSave& save);
  // As AsyncSave::abandon(), but the failure is still to be logged.
  static void end_with_program(const AsyncSave& save);
  // Of Background; not in a child process of fork().
  static bool has_unheard_failure(const AsyncSave& save);
  static void log_failure(const AsyncSave& save);
};

// Plans, begins and stages a save, and starts its thread. call.deadline is that of the whole save;
// its interrupt ends only this call. Throws what async_save() throws.
std::shared_ptr<Background> save_in_background(const SaveCall& call, const AsyncOptions& async,
                                               const MadeRequest& request);

}  // namespace tilestone::engine
