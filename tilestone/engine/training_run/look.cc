#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/description_internal.h"
#include "tilestone/engine/open/detect_internal.h"
#include "tilestone/engine/open/opening_internal.h"
#include "tilestone/engine/training_run/hints_internal.h"
#include "tilestone/engine/training_run/look_internal.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/foreign.h"
#include "tilestone/format/known/known.h"
#include "tilestone/format/megatron_mark.h"
#include "tilestone/format/torch_dist/torch_dist.h"

namespace tilestone::engine {
namespace {

using Sizes = std::map<std::string, uint64_t>;  // of files, by name

struct Seen {
  std::vector<std::string> names;
  Sizes sizes;
  std::map<std::string, double> times;  // of the files whose time is known
  bool at_once = false;                 // Depth::kAtOnce
};

Seen see(Storage& storage) {
  Listing listed = storage.listing("", Depth::kAtOnce);
  const bool at_once = listed.is_whole;
  if (!at_once) listed = storage.listing("", Depth::kTree);
  Seen seen{std::move(listed.files), {}, {}, at_once};
  for (size_t i = 0; i < seen.names.size(); ++i) {
    const std::string& name = seen.names[i];
    const auto info = listed.infos.empty() ? storage.stat(name) : std::optional(listed.infos[i]);
    if (!info || !info->regular) continue;
    seen.sizes.emplace(name, info->size);
    if (info->modified) seen.times.emplace(name, *info->modified);
  }
  return seen;
}

uint64_t sum_of_sizes(const Sizes& sizes) {
  uint64_t bytes = 0;
  for (const auto& [name, size] : sizes) bytes += size;
  return bytes;
}

std::optional<double> newest_time(const Seen& seen, const std::vector<std::string>& names) {
  std::optional<double> newest;
  for (const std::string& name : names) {
    const auto found = seen.times.find(name);
    if (found != seen.times.end()) newest = std::max(newest.value_or(0), found->second);
  }
  return newest;
}

// Whether the files of a step have the size that its hint says. Where each call is a request, that
// is not asked.
bool is_as_hinted(Storage& storage, const StepInfo& hinted) {
  return storage.facts().costs_requests || has_files_of(storage, hinted);
}

// Items whose file is missing or too short, and that have no copy elsewhere.
std::optional<Error> find_lost_files(const Opened& opened, const Sizes& sizes) {
  const Metadata& metadata = opened.metadata;
  std::set<std::string> lost;
  const auto is_whole = [&](const ItemLocation& at) {
    const auto size = sizes.find(metadata.files.at(at.file));
    return size != sizes.end() && at.offset <= size->second &&
           at.length <= size->second - at.offset;
  };
  const auto check = [&](const ItemLocation& at, bool has_intact_copy) {
    if (!has_intact_copy && !is_whole(at)) lost.insert(metadata.files.at(at.file));
  };
  for (uint32_t t = 0; t < metadata.tensors.size(); ++t) {
    const StoredTensor& tensor = metadata.tensors[t];
    for (uint32_t c = 0; c < tensor.chunks.size(); ++c) {
      if (is_whole(tensor.chunks[c].at)) continue;
      check(tensor.chunks[c].at,
            std::ranges::any_of(metadata.copies_of(t, c),
                                [&](const auto& copy) { return is_whole(copy.at); }));
    }
  }
  for (const StoredObject& object : metadata.objects) {
    check(object.at, std::ranges::any_of(object.copies, is_whole));
  }
  if (opened.common) check(opened.common->at, !opened.common->copies.empty());
  if (lost.empty()) return std::nullopt;
  const std::string& file = *lost.begin();
  const size_t more = lost.size() - 1;
  return Error(ErrorCode::kCorrupt,
               fmt::format("a data file is {}{}", sizes.contains(file) ? "too short" : "missing",
                           more == 0 ? "" : fmt::format(", and {} more are incomplete", more)))
      .with_file(file);
}

// Data files with the index's save id are of a save that left a manifest.
bool has_lost_manifest(const Opened& opened) {
  const Metadata& metadata = opened.metadata;
  if (opened.manifest) return false;
  return std::any_of(metadata.files.begin(), metadata.files.end(), [&](const std::string& name) {
    const auto own = parse_tilestone_name(name);
    return own && own->save_id == metadata.save_id;
  });
}

// Stock Megatron-Core writes metadata.json last, and not in one step.
bool is_unfinished_of_megatron(const Sizes& sizes) {
  const auto mark = sizes.find(std::string(kMegatronConfig));
  if (mark != sizes.end()) return mark->second == 0;
  return sizes.contains(std::string(kMegatronCommon));
}

void describe_checkpoint(Look& look, const Seen& seen, const std::shared_ptr<Storage>& storage) {
  StepInfo& info = look.info;
  const std::vector<std::string> none;
  Found found =
      find_checkpoint(storage, nullptr, std::nullopt, nullptr, seen.at_once ? seen.names : none);
  const Opened opened = open_description(std::move(found.description), nullptr);
  info.format = opened.format->name();
  info.dialect = opened.dialect->name();
  info.writer = opened.metadata.writer;
  info.save_id = opened.metadata.save_id;
  info.lineage = {};
  if (opened.manifest) {
    info.lineage = lineage_of(opened.manifest->attributes);
    info.metrics = metrics_of(opened.manifest->attributes);
  }
  info.time = newest_time(seen, opened.files.names);
  look.lost_manifest = has_lost_manifest(opened);
  if (look.lost_manifest) {
    look.error = Error(ErrorCode::kCorrupt,
                       "the manifest is missing, so its run and its checksums are not known")
                     .with_file(manifest_name(info.save_id))
                     .with_hint(
                         "copy .tilestone from where this folder was copied from; to load what is "
                         "there, name the folder's path");
    info.state = StepState::kDamaged;
    return;
  }
  look.error = find_lost_files(opened, seen.sizes);
  // The checkpoint may have been published since its files were listed.
  if (look.error) look.error = find_lost_files(opened, see(*storage).sizes);
  info.state = look.error ? StepState::kDamaged : StepState::kDurable;
}

void describe_removed(StepInfo& info) {
  info.state = StepState::kUnfinished;
  info.problem = info.is_saved_to ? "it is being removed" : kRemovedHint;
}

// Whether the checkpoint that was seen there has been removed meanwhile.
bool was_removed(Storage& storage) {
  const std::vector<std::string> names = storage.list();
  return contains_name(names, kRemovedName) ||
         std::ranges::all_of(names, [](const std::string& name) { return name == kLockName; });
}

// Says what a folder without a checkpoint is.
void describe_remains(Look& look, const Error& error, const Seen& seen, Storage& storage) {
  StepInfo& info = look.info;
  const auto read = [&](const std::string& name) { return read_file(storage, name, kAnySize); };
  if (const auto other = find_foreign(seen.names, read)) {
    info.state = StepState::kForeign;
    info.problem = "it is " + other->kind;
    return;
  }
  const auto lost = find_lost(storage, seen.names, read_notes(storage, seen.names));
  if (lost && !lost->began_here && !info.is_saved_to) {
    info.state = StepState::kDamaged;
    look.error = Error(ErrorCode::kCorrupt, lost->what).with_hint(lost->hint);
    return;
  }
  info.state = StepState::kUnfinished;
  if (info.is_saved_to) {
    info.problem = "it is being saved";
  } else if (error.hint().empty()) {
    info.problem = seen.names.empty() ? "the folder is empty" : "it holds no checkpoint";
  } else {
    info.problem = error.hint();
  }
}

// What holds no checkpoint, or none that can be opened.
void describe_failed(Look& look, const Error& error, const Seen& seen, Storage& storage) {
  if (error.code() == ErrorCode::kNotFound) {
    try {
      return describe_remains(look, error, seen, storage);
    } catch (const Error& lost) {  // a file that was seen has gone since
      if (lost.code() != ErrorCode::kNotFound) throw;
      return describe_removed(look.info);
    }
  }
  const bool foreign = error.code() == ErrorCode::kUnsupported;
  look.info.state = foreign ? StepState::kForeign : StepState::kDamaged;
  if (foreign) look.info.problem = error.what();
  if (!foreign) look.error = error;
}

// Without the line of what is no checkpoint, or can't be read.
Look look_into(const std::shared_ptr<Storage>& storage, StepInfo listed) {
  Look look{{.step = listed.step, .name = std::move(listed.name), .is_link = listed.is_link}};
  StepInfo& info = look.info;
  const Seen seen = see(*storage);
  look.is_empty = seen.names.empty();
  info.is_saved_to = contains_name(seen.names, kLockName) && is_saved_to(*storage);
  info.bytes = sum_of_sizes(seen.sizes);
  info.time = newest_time(seen, seen.names);
  if (contains_name(seen.names, kRemovedName)) {
    describe_removed(info);
    return look;
  }
  if (is_unfinished_of_megatron(seen.sizes)) {
    info.state = StepState::kUnfinished;
    info.problem =
        std::string("its save has not ended: ") + std::string(kMegatronConfig) +
        (seen.sizes.contains(std::string(kMegatronConfig)) ? " is empty" : " is missing");
    return look;
  }
  try {
    describe_checkpoint(look, seen, storage);
  } catch (const Error& error) {
    describe_failed(look, error, seen, *storage);
  }
  if (look.error && was_removed(*storage)) {
    look.error.reset();
    describe_removed(info);
  }
  if (look.error) info.problem = look.error->what();
  return look;
}

}  // namespace

Look look_at(const std::shared_ptr<Storage>& storage, StepInfo listed) {
  Look look = look_into(storage, std::move(listed));
  if (look.info.bytes == 0 || !look.info.save_id.empty()) return look;
  StepInfo said;
  read_lineage(*storage, said);
  look.info.save_id = said.save_id;
  look.info.lineage = said.lineage;
  return look;
}

bool has_files_of(Storage& storage, const StepInfo& known) {
  const Seen seen = see(storage);
  return sum_of_sizes(seen.sizes) == known.bytes &&
         (known.save_id.empty() || seen.sizes.contains(manifest_name(known.save_id))) &&
         !(contains_name(seen.names, kLockName) && is_saved_to(storage));
}

Look look_or_believe(const RunDirectory& run, const StepInfo& listed) {
  Look look{listed};
  const bool is_believed = !listed.hint.empty() &&
                           is_as_hinted(run.at(listed.name).storage(), listed) &&
                           add_metrics(run.location().storage(), look.info);
  return is_believed ? look : look_at(run.at(listed.name).shared(), listed);
}

bool may_be_checkpoint(Storage& storage) {
  return may_be_checkpoint(storage, storage.list_files());
}

// Every format has a file at the top, and a metadata.json stands for those below it.
bool may_be_checkpoint(Storage& storage, std::span<const std::string> files) {
  const bool may_be = torch_dist_format()->detect(files) || contains_name(files, kMegatronConfig) ||
                      detect(storage, files).format != nullptr;
  return may_be && any_checkpoint(storage, *torch_dist_format());
}

bool is_about_files(const Error& error) {
  if (error.code() == ErrorCode::kNotFound && !error.key().empty() && error.file().empty()) {
    return false;
  }
  return error.code() == ErrorCode::kNotFound || error.code() == ErrorCode::kCorrupt ||
         error.code() == ErrorCode::kUnsafe || error.code() == ErrorCode::kCoverage;
}

}  // namespace tilestone::engine
