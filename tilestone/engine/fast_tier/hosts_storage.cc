#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/fast_tier/hosts_storage_internal.h"
#include "tilestone/format/manifest.h"
#include "tilestone/storage/object_store.h"
#include "tilestone/storage/read_only.h"

namespace tilestone::engine {
namespace {

const std::string kScheme = "tilestone-hosts";

std::mutex urls_mutex;  // guards the following
std::map<std::string, std::shared_ptr<Storage>>& storages() {
  static auto* const all = new std::map<std::string, std::shared_ptr<Storage>>();
  return *all;
}

// The same description on every rank, whatever each host's directory is called.
std::shared_ptr<Storage> opened(const std::string& url) {
  const std::string save_id = url.substr(kScheme.size() + 3);
  const std::lock_guard lock(urls_mutex);
  const auto found = storages().find(save_id);
  if (found == storages().end()) {
    throw Error(ErrorCode::kNotFound, "the step is open no more").with_file(url);
  }
  return found->second;
}

// A file of another host, or of the run's directory.
class FarFile final : public ReadableFile {
 public:
  FarFile(std::string name, uint64_t size, int owner, std::unique_ptr<ReadableFile> there)
      : name_(std::move(name)), size_(size), owner_(owner), there_(std::move(there)) {}
  uint64_t size() const override { return size_; }
  const std::string& name() const override { return name_; }
  int owner() const { return owner_; }
  const ReadableFile* there() const { return there_.get(); }  // null: a host has it

 private:
  const std::string name_;
  const uint64_t size_;
  const int owner_;
  const std::unique_ptr<ReadableFile> there_;
};

class HostsStorage final : public ReadOnlyStorage {
 public:
  HostsStorage(std::shared_ptr<Storage> own, std::string description,
               std::shared_ptr<HostReads> fetching, std::shared_ptr<Storage> there)
      : own_(std::move(own)),
        description_(std::move(description)),
        fetching_(std::move(fetching)),
        there_(std::move(there)) {}

  void add(const std::string& name, uint64_t size, std::optional<int> owner) {
    const auto info = own_->stat(name);
    const bool is_here = info && info->size == size;
    files_.emplace(name, File{size, owner, is_here});
  }

  StorageFacts facts() const override {
    StorageFacts facts;
    facts.description = description_;
    // Of one host, it has all the files; what is read in the run's directory is read once.
    if (there_ == nullptr) facts.page_cache = own_->facts().page_cache;
    return facts;
  }

  std::unique_ptr<ReadableFile> open(const std::string& name) override {
    const auto found = files_.find(name);
    if (found == files_.end()) {
      throw Error(ErrorCode::kNotFound, "no host has the file").with_file(name);
    }
    const File& file = found->second;
    if (file.is_here) return own_->open(name);
    auto there = file.owner ? nullptr : there_->open(name);
    return std::make_unique<FarFile>(name, file.size, file.owner.value_or(-1), std::move(there));
  }

  void read(std::span<const ReadOp> ops, const ReadOptions& options,
            const ReadDone& done) override {
    std::vector<ReadOp> near, there;
    std::vector<size_t> near_index, there_index, far_index;
    for (size_t i = 0; i < ops.size(); ++i) {
      const auto* const far = dynamic_cast<const FarFile*>(ops[i].file);
      if (far == nullptr) near.push_back(ops[i]);
      if (far != nullptr && far->there() != nullptr) {
        there.push_back(ops[i]);
        there.back().file = far->there();
        there_index.push_back(i);
      } else {
        (far == nullptr ? near_index : far_index).push_back(i);
      }
    }
    const auto pass_on = [&](Storage& to, const auto& some, const std::vector<size_t>& index) {
      if (some.empty()) return;
      to.read(some, options, [&](size_t i, ByteView bytes) { done(index[i], bytes); });
    };
    pass_on(*own_, near, near_index);
    if (there_ != nullptr) pass_on(*there_, there, there_index);
    if (options.prefetched == nullptr) read_far(ops, far_index, options.deadline, done);
  }

  std::optional<FileInfo> stat(const std::string& name) override {
    const auto found = files_.find(name);
    if (found == files_.end()) return std::nullopt;
    return FileInfo{.size = found->second.size};
  }

  Listing listing(const std::string& prefix, Depth depth) override {
    Listing found;
    std::set<std::string> directories;
    for (const auto& [name, file] : files_) {
      if (!name.starts_with(prefix)) continue;
      const size_t slash = depth == Depth::kLevel ? name.find('/', prefix.size()) : name.npos;
      if (slash == name.npos) {
        found.files.push_back(name);
      } else {
        directories.insert(name.substr(0, slash));
      }
    }
    found.directories.assign(directories.begin(), directories.end());
    return found;
  }

 private:
  struct File {
    uint64_t size = 0;
    std::optional<int> owner;  // nullopt: the run's directory
    bool is_here = false;
  };

  static constexpr uint64_t kMostAtOnce = 32u << 20;  // bytes

  Error refusal() const override {
    return Error(ErrorCode::kUnsupported, "a step of a fast tier is only read: " + description_);
  }

  void read_far(std::span<const ReadOp> ops, const std::vector<size_t>& indices,
                const Deadline& deadline, const ReadDone& done) {
    for (size_t first = 0; first < indices.size();) {
      size_t end = first;
      uint64_t bytes = 0;
      std::vector<FarRange> ranges;
      std::vector<Bytes> own(indices.size() - first);
      for (; end < indices.size() && (end == first || bytes < kMostAtOnce); ++end) {
        const ReadOp& op = ops[indices[end]];
        const auto& file = dynamic_cast<const FarFile&>(*op.file);
        if (op.offset > file.size() || op.size > file.size() - op.offset) {
          throw Error(ErrorCode::kCorrupt, "the file is shorter than what is read of it")
              .with_file(file.name());
        }
        Bytes& memory = own[end - first];
        if (op.target == nullptr) memory.resize(op.size);
        std::byte* const target = op.target == nullptr ? memory.data() : op.target;
        ranges.push_back({file.owner(), file.name(), op.offset, op.size, target});
        bytes += op.size;
      }
      fetching_->get(ranges, deadline);
      for (size_t i = first; i < end; ++i) {
        const ByteView view(ranges[i - first].target, ranges[i - first].size);
        set_checksums(ops[indices[i]], view);
        done(indices[i], view);
      }
      first = end;
    }
  }

  const std::shared_ptr<Storage> own_;
  const std::string description_;
  const std::shared_ptr<HostReads> fetching_;
  const std::shared_ptr<Storage> there_;
  std::map<std::string, File> files_;
};

}  // namespace

std::shared_ptr<Storage> hosts_storage(std::shared_ptr<Storage> own, const KeptStep& about,
                                       const SaidStep& said, std::shared_ptr<HostReads> fetching,
                                       std::shared_ptr<Storage> there) {
  auto made = std::make_shared<HostsStorage>(
      std::move(own), fmt::format("step {} on the hosts (save {})", about.step, about.save_id),
      std::move(fetching), std::move(there));
  for (size_t i = 0; i < about.files.size(); ++i) {
    const std::vector<int>& holders = said.holders.at(i);
    made->add(about.files[i].name, about.files[i].size,
              holders.empty() ? std::nullopt : std::optional(holders.front()));
  }
  for (const auto& entry : about.index) made->add(entry.name, entry.size, said.keeper);
  made->add(manifest_name(about.save_id), about.manifest_size, said.keeper);
  return made;
}

StepUrl::StepUrl(std::string save_id, std::shared_ptr<Storage> storage)
    : save_id_(std::move(save_id)) {
  static const bool registered = [] {
    register_store(kScheme, opened);
    return true;
  }();
  static_cast<void>(registered);
  const std::lock_guard lock(urls_mutex);
  storages()[save_id_] = std::move(storage);
}

StepUrl::~StepUrl() {
  const std::lock_guard lock(urls_mutex);
  storages().erase(save_id_);
}

std::string StepUrl::url() const { return kScheme + "://" + save_id_; }

}  // namespace tilestone::engine
