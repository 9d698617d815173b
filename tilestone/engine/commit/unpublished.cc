#include "tilestone/engine/commit/unpublished.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/pause.h"
#include "tilestone/engine/commit/attempt_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/description_internal.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/engine/run/terms_internal.h"
#include "tilestone/format/known/known.h"

namespace tilestone {
namespace {

constexpr size_t kNamedMissing = 16;
// Seconds. Where files can't be locked, a rank that changes nothing for so long counts as dead.
constexpr double kSilentPeriod = 60;

using engine::Attempt;
using engine::AttemptHead;
using engine::AttemptState;
using engine::Outcome;

engine::Notes notes_at(Storage& storage) {
  return engine::read_notes(storage, storage.list(std::string(engine::kTilestoneDirectory) + "/"));
}

// The attempts at the location, except those of which only the outcome is left.
std::set<std::string> attempts_at(Storage& storage) { return notes_at(storage).attempts; }

// Without a wish, one that has not failed.
std::string choose_save(const Location& location, const std::string& wanted) {
  const engine::Notes notes = notes_at(location.storage());
  const std::set<std::string> open = notes.open(false);
  const std::set<std::string>& found = wanted.empty() && !open.empty() ? open : notes.attempts;
  const std::string at = " at " + location.describe();
  if (found.empty()) throw Error(ErrorCode::kNotFound, "no unpublished save" + at);
  if (!wanted.empty()) {
    if (found.contains(wanted)) return wanted;
    throw Error(ErrorCode::kNotFound, "no unpublished save " + wanted + at);
  }
  if (found.size() == 1) return *found.begin();
  std::string ids;
  for (const std::string& save_id : found) ids += (ids.empty() ? "" : ", ") + save_id;
  throw Error(ErrorCode::kInvalidArgument, std::to_string(found.size()) + " unpublished saves" + at)
      .with_hint("name one of them: " + ids);
}

AttemptHead head_of(Storage& storage, const std::string& save_id) {
  if (auto head = engine::read_head(storage, save_id)) return *std::move(head);
  throw Error(ErrorCode::kNotFound, "the save " + save_id +
                                        " has no head: it is just ending, or its first rank died "
                                        "before it wrote the head")
      .with_file(engine::attempt_name(save_id));
}

// What changes while one of its ranks is alive: the names of its files, and of its data files the
// size and when they were changed. `alive`: one of its ranks has its claim.
struct Image {
  std::map<std::string, std::pair<uint64_t, double>> files;
  bool alive = false;
};
Image image_of(Storage& storage, const std::string& save_id) {
  Image image;
  const auto add = [&](const std::string& name) {
    const auto info = storage.stat(name);
    if (info) image.files.emplace(name, std::pair(info->size, info->modified.value_or(0)));
  };
  for (const std::string& name : storage.list(engine::attempt_directory(save_id) + "/")) {
    add(name);
    image.alive |= name.ends_with(engine::kClaimSuffix) && engine::is_claimed(storage, name);
  }
  for (const std::string& name : storage.list_files(save_id)) add(name);
  return image;
}
bool has_changed(Storage& storage, const std::string& save_id, const Image& before) {
  const Image now = image_of(storage, save_id);
  return now.alive || now.files != before.files;
}

void wait_for(double seconds, const std::shared_ptr<const Interrupt>& interrupt) {
  pause(std::chrono::duration<double>(seconds), Deadline::never().with_interrupt(interrupt));
}

void check_seconds(const char* name, double seconds) {
  if (seconds >= 0) return;
  throw Error(ErrorCode::kInvalidArgument,
              std::string(name) + " must be a number of seconds that is at least 0");
}

UnpublishedSave described(const std::string& save_id, const AttemptState& state) {
  UnpublishedSave save;
  save.save_id = save_id;
  save.abandoned = state.outcome == Outcome::kAbandoned;
  if (state.failed) save.failure = state.failed->what();
  save.text = engine::attempt_text(save_id, state);
  save.missing_count = state.head ? state.missing.size() : 1;
  save.missing = state.missing;
  save.missing.resize(std::min(save.missing.size(), kNamedMissing));
  if (!state.head) return save;
  save.world_size = state.head->world_size;
  save.format = state.head->format;
  save.dialect = state.head->dialect;
  return save;
}

}  // namespace

std::vector<UnpublishedSave> find_unpublished(const Location& location,
                                              const FindOptions& options) {
  try {
    check_seconds("watch", options.watch);
    Storage& storage = location.storage();
    std::map<std::string, Image> before;
    if (options.watch > 0) {
      for (const std::string& save_id : attempts_at(storage)) {
        before.emplace(save_id, image_of(storage, save_id));
      }
      if (!before.empty()) wait_for(options.watch, options.interrupt);
    }
    std::vector<UnpublishedSave> found;
    for (const std::string& save_id : attempts_at(storage)) {
      const auto state = engine::look_at_attempt(storage, save_id);
      if (!state) continue;
      UnpublishedSave save = described(save_id, *state);
      const auto first = before.find(save_id);
      const bool same = first != before.end() && !has_changed(storage, save_id, first->second);
      if (options.watch > 0 && !same) save.alive = true;
      if (same && options.watch >= kSilentPeriod) save.alive = false;
      found.push_back(std::move(save));
    }
    return found;
  } catch (...) {
    rethrow_cause();
  }
}

std::string publish(const Location& location, const PublishOptions& options) {
  try {
    const Deadline deadline =
        engine::deadline_of(options.timeout).with_interrupt(options.interrupt);
    if (attempts_at(location.storage()).empty() && options.save_id.empty() &&
        engine::is_rank_local_at(location)) {
      return engine::publish_rank_local(location, options.threads, deadline);
    }
    const std::string save_id = choose_save(location, options.save_id);
    Attempt attempt(location.shared(), head_of(location.storage(), save_id));
    if (attempt.head.rank_local && !engine::look_at_attempt(location.storage(), save_id)) {
      throw Error(ErrorCode::kNotFound, "the save " + save_id + " at " + location.describe() +
                                            " is an ordinary checkpoint already")
          .with_hint("`tilestone gc` removes what is left of its ranks' metadata");
    }
    while (!publish_if_complete(attempt, true, options.threads, deadline)) {
      // Between the two looks, the last rank may have reported, or another process published.
      const auto state = engine::look_at_attempt(location.storage(), save_id);
      if (state && !state->missing.empty() && !engine::is_published(state->outcome)) {
        throw Error(ErrorCode::kRankFailed, engine::attempt_text(save_id, *state))
            .with_rank(state->missing.front());
      }
      if (deadline.expired()) {
        throw Error(ErrorCode::kTimeout, "the save " + save_id +
                                             " was not published before the deadline, though all "
                                             "ranks have written");
      }
    }
    if (!attempt.head.rank_local) return save_id;
    return engine::publish_rank_local(location, options.threads, deadline,
                                      static_cast<Checks::Differing>(attempt.head.common_differs));
  } catch (...) {
    rethrow_cause();
  }
}

std::string abandon(const Location& location, const AbandonOptions& options) {
  try {
    check_seconds("period", options.period);
    Storage& storage = location.storage();
    const std::string save_id = choose_save(location, options.save_id);
    const auto state = engine::look_at_attempt(storage, save_id);
    const auto head = state ? state->head : std::nullopt;  // a damaged one can be abandoned
    const Image before = image_of(storage, save_id);
    wait_for(options.period, options.interrupt);
    if (has_changed(storage, save_id, before)) {
      throw Error(ErrorCode::kAlreadyExists, "the save " + save_id + " is under way");
    }
    if (head && engine::read_outcome(storage, save_id) != Outcome::kAbandoned &&
        engine::meeting_of(storage, *head).missing(false).empty() &&
        engine::can_be_published(
            Attempt(location.shared(), *head),
            Deadline::after(std::chrono::duration<double>(std::max(options.period, 1.0))))) {
      throw Error(ErrorCode::kUnsupported, "all ranks of the save " + save_id + " have written")
          .with_hint("publish it; remove the checkpoint if it is not wanted");
    }
    if (engine::is_published(
            engine::decide(storage, save_id, Outcome::kAbandoned, Deadline::never()))) {
      throw Error(ErrorCode::kAlreadyExists, "the save " + save_id + " is being published");
    }
    return save_id;
  } catch (...) {
    rethrow_cause();
  }
}

}  // namespace tilestone
