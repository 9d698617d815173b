#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/agree.h"
#include "tilestone/engine/fast_tier/host_folder_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/write/new_files_internal.h"

namespace tilestone::engine {
namespace {

constexpr std::string_view kStep = "step-";
const std::string kKept = kKeptName, kScratch = ".kept.tmp";
constexpr uint64_t kMostKept = 1u << 30;  // bytes of `.kept`
constexpr int kIndexThreads = 1;          // for files of an index

uint64_t ordinal_of(const HeldStep& held) { return lineage_of(held.about.attributes).ordinal; }

HeldStep held_in(Storage& folder, std::string name) {
  HeldStep held;
  held.about = KeptStep::decode(read_file(folder, kKept, kMostKept), name + "/" + kKept);
  held.folder = std::move(name);
  const std::vector<std::string> names = folder.list();
  for (size_t i = 0; i < held.about.files.size(); ++i) {
    const ReceiptFile& file = held.about.files[i];
    if (!std::ranges::binary_search(names, file.name)) continue;
    const auto info = folder.stat(file.name);
    if (info && info->size == file.size) held.here.push_back(static_cast<uint32_t>(i));
  }
  return held;
}

// Exactly as folder_of() names it: no other folder is read or removed.
bool is_step_folder(const std::string& name) {
  if (!name.starts_with(kStep)) return false;
  const std::string_view rest = std::string_view(name).substr(kStep.size());
  const size_t digits = std::min(rest.find_first_not_of("0123456789"), rest.size());
  return digits > 0 && rest.substr(digits).starts_with('-') && is_save_id(rest.substr(digits + 1));
}

void unite(SaidStep& step, const SaidStep& other) {
  if (step.holders.size() != other.holders.size()) return;  // damaged, or of another step
  for (size_t i = 0; i < step.holders.size(); ++i) {
    step.holders[i].insert(step.holders[i].end(), other.holders[i].begin(), other.holders[i].end());
  }
}

}  // namespace

std::string HostFolder::folder_of(uint64_t step, const std::string& save_id) {
  return fmt::format("{}{:08}-{}", kStep, step, save_id);
}

std::vector<HeldStep> HostFolder::list() const {
  std::vector<HeldStep> found;
  for (const std::string& name : root_->list_directories()) {
    if (!is_step_folder(name)) continue;
    try {
      const auto folder = at(name);
      if (folder->stat(kKept)) found.push_back(held_in(*folder, name));
    } catch (const Error& error) {
      log(LogLevel::kWarning, fmt::format("a step of the fast tier can't be read, and does not "
                                          "count: {}",
                                          error.what()));
    }
  }
  std::ranges::stable_sort(found, {}, ordinal_of);
  return found;
}

std::optional<HeldStep> HostFolder::find(const std::string& save_id) const {
  for (HeldStep& held : list()) {
    if (held.about.save_id == save_id) return std::move(held);
  }
  return std::nullopt;
}

HeldStep HostFolder::get(const std::string& save_id) const {
  if (auto found = find(save_id)) return *std::move(found);
  throw Error(ErrorCode::kNotFound, "the step is on this host no more");
}

Manifest HostFolder::manifest(const HeldStep& held) const {
  const std::string name = manifest_name(held.about.save_id);
  return Manifest::decode(read_file(*at(held.folder), name, held.about.manifest_size), name);
}

KeptIndex HostFolder::read(Storage& step, const KeptStep& about) {
  KeptIndex index{about, {}, {}};
  for (const KeptStep::IndexEntry& entry : about.index) {
    index.files.push_back(read_file(step, entry.name, entry.size));
  }
  index.manifest = read_file(step, manifest_name(about.save_id), about.manifest_size);
  return index;
}

void HostFolder::keep(const std::string& name, const KeptIndex& index,
                      const Deadline& deadline) const {
  const auto folder = at(name);
  const std::string manifest = manifest_name(index.about.save_id);
  std::vector<NewFile> files = {{&manifest, index.manifest}};
  for (size_t i = 0; i < index.files.size(); ++i) {
    files.push_back({&index.about.index[i].name, index.files[i]});
  }
  write_new_files(*folder, files, kIndexThreads, deadline, [](const std::string&) {});
  folder->publish(kKept, kScratch, index.about.encode(), false, deadline);
}

void HostFolder::remove(const std::string& folder) const noexcept {
  try {
    if (!root_->stat(folder)) return;  // a replaced host never had it
    at(folder)->remove(kKept);         // first: what is left then is a leftover
    root_->remove_tree(folder);
  } catch (const std::exception& error) {
    log(LogLevel::kWarning, fmt::format("{} stays in the fast tier: {}", folder, error.what()));
  }
}

void HostFolder::remove_leftovers() const {
  for (const std::string& name : root_->list_directories()) {
    if (is_step_folder(name) && !at(name)->stat(kKept)) remove(name);
  }
}

bool SaidStep::is_whole() const {
  return std::ranges::none_of(holders, [](const auto& ranks) { return ranks.empty(); });
}

StepInfo SaidStep::info() const {
  return {.step = step,
          .name = HostFolder::folder_of(step, save_id),
          .state = is_whole() ? StepState::kDurable : StepState::kDamaged,
          .save_id = save_id,
          .lineage = lineage};
}

Bytes say_steps(std::span<const HeldStep> held, int rank) {
  ByteWriter out;
  for (const HeldStep& each : held) {
    SaidStep step{each.about.step,
                  each.about.save_id,
                  lineage_of(each.about.attributes),
                  each.about.drains,
                  std::vector<std::vector<int>>(each.about.files.size()),
                  rank};
    for (const uint32_t file : each.here) step.holders[file] = {rank};
    walk_step(out, step);
  }
  return std::move(out).take();
}

std::vector<SaidStep> united_steps(std::span<const Bytes> said) {
  std::map<std::string, SaidStep> by_save;
  for (const Bytes& bytes : said) {
    ByteReader in(bytes, "what a host holds");
    while (in.remaining() > 0) {
      SaidStep step;
      walk_step(in, step);
      const auto [known, is_new] = by_save.emplace(step.save_id, step);
      if (!is_new) unite(known->second, step);
    }
  }
  std::vector<SaidStep> steps;
  for (auto& [save_id, step] : by_save) steps.push_back(std::move(step));
  std::ranges::sort(steps, {}, [](const SaidStep& step) { return step.lineage.ordinal; });
  return steps;
}

std::optional<SaidStep> agree_on_step(const Communicator& comm, const std::string& work,
                                      const Deadline& deadline, const std::function<Bytes()>& say,
                                      const std::function<bool(const SaidStep&)>& pick) {
  const auto decide = [&](int, const std::vector<Bytes>& said) {
    const std::vector<SaidStep> steps = united_steps(said);
    const auto found = std::ranges::find_if(steps, pick);
    ByteWriter out;
    if (found != steps.end()) walk_step(out, *found);
    return Decision{std::move(out).take(), true};
  };
  const auto answer = agree(comm, work, deadline, [&](int, const Bytes&) { return say(); }, decide);
  if (answer.empty()) return std::nullopt;
  ByteReader in(answer, "a step of the hosts");
  SaidStep step;
  walk_step(in, step);
  return step;
}

}  // namespace tilestone::engine
