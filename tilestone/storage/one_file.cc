#include "tilestone/storage/one_file.h"

#include <utility>

#include "tilestone/base/error.h"

namespace tilestone {
namespace {

class OneFile final : public Storage {
 public:
  OneFile(std::shared_ptr<Storage> directory, std::string name)
      : directory_(std::move(directory)), name_(std::move(name)) {}

  bool can(StorageCapability what) override {
    return what == StorageCapability::kSharedCache && directory_->can(what);
  }
  ReadCosts read_costs() const override { return directory_->read_costs(); }
  uint64_t available_cache() override { return directory_->available_cache(); }
  std::string describe() const override { return directory_->describe() + "/" + name_; }
  StorageEntry entry() const { return {directory_, name_}; }

  std::unique_ptr<ReadableFile> open(const std::string& name) override {
    if (name != name_) {
      throw Error(ErrorCode::kNotFound, "only one file was opened, not its directory")
          .with_file(name);
    }
    return directory_->open(name);
  }
  void read(std::span<const ReadOp> ops, const ReadOptions& options,
            const ReadDone& done) override {
    directory_->read(ops, options, done);
  }
  uint64_t prefetch(std::span<const ReadOp> ops, const ReadOptions& options) override {
    return directory_->prefetch(ops, options);
  }
  std::optional<FileInfo> stat(const std::string& name) override {
    return name == name_ ? directory_->stat(name) : std::nullopt;
  }
  std::vector<std::string> list(const std::string& prefix) override {
    if (!name_.starts_with(prefix) || !directory_->stat(name_)) return {};
    return {name_};
  }
  std::vector<std::string> list_directories(const std::string&) override { return {}; }
  std::unique_ptr<StorageLock> try_lock(const std::string&) override { refuse(); }
  bool is_locked(const std::string&) override { return false; }

  std::unique_ptr<WritableFile> create(const std::string&, uint64_t) override { refuse(); }
  void rename(const std::string&, const std::string&, bool) override { refuse(); }
  void remove(const std::string&) override { refuse(); }
  void make_directory(const std::string&) override { refuse(); }
  void remove_directory(const std::string&) override { refuse(); }
  void exchange_directories(const std::string&, const std::string&) override { refuse(); }
  void rename_directory(const std::string&, const std::string&) override { refuse(); }
  void sync_directory(const std::string&) override { refuse(); }

 private:
  [[noreturn]] void refuse() const {
    throw Error(ErrorCode::kAlreadyExists, "the location is a file: " + describe())
        .with_hint("save to a directory");
  }

  const std::shared_ptr<Storage> directory_;
  const std::string name_;
};

}  // namespace

std::shared_ptr<Storage> one_file(std::shared_ptr<Storage> directory, std::string name) {
  return std::make_shared<OneFile>(std::move(directory), std::move(name));
}

std::optional<StorageEntry> entry_of_one_file(const Storage& storage) {
  const auto* const file = dynamic_cast<const OneFile*>(&storage);
  return file == nullptr ? std::nullopt : std::optional(file->entry());
}

}  // namespace tilestone
