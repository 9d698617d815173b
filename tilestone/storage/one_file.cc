#include "tilestone/storage/one_file.h"

#include <utility>

#include "tilestone/base/error.h"

namespace tilestone {
namespace {

class OneFile final : public Storage {
 public:
  OneFile(std::shared_ptr<Storage> directory, std::string name)
      : directory_(std::move(directory)), name_(std::move(name)) {}

  StorageFacts facts() const override {
    StorageFacts facts = directory_->facts();
    facts.description += "/" + name_;
    return facts;
  }
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
  std::optional<FileInfo> stat(const std::string& name) override {
    return name == name_ ? directory_->stat(name) : std::nullopt;
  }
  Listing listing(const std::string& prefix, Depth) override {
    if (!name_.starts_with(prefix) || !directory_->stat(name_)) return {};
    return {{name_}, {}};
  }
  std::unique_ptr<StorageClaim> claim(const std::string&, const Deadline&) override { refuse(); }
  bool is_claimed(const std::string&) override { return false; }
  std::shared_ptr<Storage> until(const Deadline& deadline) override {
    return std::make_shared<OneFile>(directory_->until(deadline), name_);
  }

  std::unique_ptr<WritableFile> create(const std::string&, uint64_t, const Deadline&) override {
    refuse();
  }
  bool put(const std::string&, ByteView, const Condition&, const std::string&, Deadline) override {
    refuse();
  }
  void remove(std::span<const std::string>) override { refuse(); }
  void settle(const std::string&) override { refuse(); }

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
