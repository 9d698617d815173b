#include <algorithm>
#include <cerrno>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/storage/lease.h"
#include "tilestone/storage/memory_storage_testing.h"
#include "tilestone/storage/names_internal.h"

namespace tilestone {
namespace {

// As the ETag of S3, it is made of the content alone.
std::string tag_of(const MemoryFile& file) {
  const std::lock_guard lock(file.mutex);
  return std::to_string(crc32(file.data)) + "-" + std::to_string(file.data.size());
}

void expect_time(const Deadline& deadline, const std::string& name) {
  if (!deadline.expired()) return;
  throw Error(ErrorCode::kTimeout, "the deadline passed before a file was written").with_file(name);
}

std::shared_ptr<MemoryFile> file_of(ByteView bytes) {
  auto file = std::make_shared<MemoryFile>();
  file->data.assign(bytes.begin(), bytes.end());
  return file;
}

}  // namespace

class MemoryObjects::Growing : public WritableFile {
 public:
  Growing(MemoryObjects& store, std::string name) : store_(store), name_(std::move(name)) {}

  void append(Buffer buffer) override { append(buffer.view()); }
  void append(ByteView bytes) override {
    expect_open();
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }
  void sync(Deadline deadline) override {
    expect_open();
    expect_time(deadline, name_);
    finish();
  }
  void close() override {
    expect_open();
    if (!is_finished_) finish();
    open_ = false;
  }
  uint64_t size() const override { return bytes_.size(); }
  const std::string& name() const override { return name_; }

 private:
  void expect_open() const {
    if (!open_) throw Error(ErrorCode::kInvalidArgument, "the file is closed").with_file(name_);
  }
  void finish() {
    const std::lock_guard lock(store_.mutex_);
    is_finished_ = true;
    if (store_.entries_.try_emplace(name_, file_of(bytes_)).second) return;
    throw Error(ErrorCode::kAlreadyExists, "cannot create a file")
        .with_file(name_)
        .with_errno(EEXIST);
  }

  MemoryObjects& store_;
  const std::string name_;
  Bytes bytes_;
  bool is_finished_ = false, open_ = true;
};

MemoryObjects::MemoryObjects(FileImage initial) : MemoryStorage({}) {
  for (auto& [name, bytes] : initial) entries_.emplace(name, file_of(bytes));
}

StorageFacts MemoryObjects::facts() const {
  StorageFacts facts = {.description = "memory"};
  facts.costs_requests = true;
  facts.put_if_tag = true;
  facts.lease_period = kLeasePeriod;
  return facts;
}

std::unique_ptr<WritableFile> MemoryObjects::create(const std::string& name, uint64_t,
                                                    const Deadline&) {
  check_file_name(name);
  return std::make_unique<Growing>(*this, name);
}

// Of S3, the first bytes of such a file can still be read.
void MemoryObjects::expect_readable(const std::string& name, const MemoryFile& file) const {
  if (find(name).get() == &file) return;
  throw Error(ErrorCode::kNotFound, "the file was replaced while it was read").with_file(name);
}

std::optional<FileInfo> MemoryObjects::stat(const std::string& name) {
  auto info = MemoryStorage::stat(name);
  if (!info) return info;
  if (const auto file = find(name)) {
    info->tag = tag_of(*file);
    info->least_age =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - file->made).count();
  }
  return info;
}

Listing MemoryObjects::listing(const std::string& prefix, Depth depth) {
  const bool is_whole = depth == Depth::kAtOnce;
  if (is_whole) depth = Depth::kTree;
  Listing found = MemoryStorage::listing(prefix, depth);
  found.is_whole = is_whole;
  for (const std::string& name : found.files) {
    const auto file = find(name);
    found.infos.push_back({.size = file == nullptr ? 0 : file->size()});
  }
  if (depth == Depth::kTree) return found;
  for (const std::string& name : MemoryStorage::listing(prefix, Depth::kTree).files) {
    const size_t slash = name.find('/', prefix.size());
    if (slash == std::string::npos) continue;
    std::string directory = name.substr(0, slash);
    if (found.directories.empty() || found.directories.back() != directory) {
      found.directories.push_back(std::move(directory));
    }
  }
  std::ranges::sort(found.directories);
  found.directories.erase(std::ranges::unique(found.directories).begin(), found.directories.end());
  return found;
}

std::optional<std::string> MemoryObjects::put_for_tag(const std::string& name, ByteView bytes,
                                                      const Condition& condition,
                                                      const std::string&, Deadline deadline) {
  check_file_name(name);
  expect_time(deadline, name);
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(name);
  if (condition.is_absent() && found != entries_.end()) return std::nullopt;
  if (const std::string& tag = condition.tag(); !tag.empty()) {
    if (found == entries_.end() || tag_of(*found->second) != tag) return std::nullopt;
  }
  entries_[name] = file_of(bytes);
  return "";
}

bool MemoryObjects::remove_files(std::span<const std::string> names, const FileRemoval& how) {
  if (!how.if_tag) return MemoryStorage::remove_files(names, how);
  const std::string& name = names.front();
  check_file_name(name);
  expect_time(how.deadline.value_or(Deadline::never()), name);
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(name);
  if (found == entries_.end()) return true;
  if (tag_of(*found->second) != *how.if_tag) return false;
  entries_.erase(found);
  return true;
}

std::unique_ptr<StorageClaim> MemoryObjects::claim(const std::string& name,
                                                   const Deadline& patience) {
  return claim_lease(shared_from_this(), name, kLeasePeriod, patience);
}

bool MemoryObjects::is_claimed(const std::string& name) {
  return is_leased(*this, name, kLeasePeriod);
}

std::shared_ptr<Storage> memory_objects(FileImage initial) {
  return std::make_shared<MemoryObjects>(std::move(initial));
}

}  // namespace tilestone
