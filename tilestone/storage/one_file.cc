#include "tilestone/storage/one_file.h"

#include <algorithm>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/storage/read_only.h"

namespace tilestone {
namespace {

class OneFile final : public ReadOnlyStorage {
 public:
  OneFile(std::shared_ptr<Storage> directory, std::string name, std::string mark)
      : directory_(std::move(directory)), name_(std::move(name)), mark_(std::move(mark)) {}

  StorageFacts facts() const override {
    StorageFacts facts = directory_->facts();
    facts.description += "/" + name_;
    facts.directories = nullptr;  // they are not those of one file
    facts.has_folders = facts.renames = false;
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
  Listing listing(const std::string& prefix, Depth depth) override {
    if (depth == Depth::kUnfinished) return {};
    if (!name_.starts_with(prefix) || !directory_->stat(name_)) return {};
    Listing found{{name_}, {}};
    if (!mark_.empty() && mark_.starts_with(prefix)) found.files.push_back(mark_);
    std::sort(found.files.begin(), found.files.end());
    return found;
  }
  std::shared_ptr<Storage> view(const std::string& directory,
                                const std::optional<Deadline>& deadline) override {
    if (!directory.empty()) return Storage::view(directory, deadline);
    return std::make_shared<OneFile>(directory_->view("", deadline), name_, mark_);
  }

 private:
  Error refusal() const override { return refusal_of_file(*this); }

  const std::shared_ptr<Storage> directory_;
  const std::string name_;
  const std::string mark_;
};

}  // namespace

std::shared_ptr<Storage> one_file(std::shared_ptr<Storage> directory, std::string name,
                                  std::string mark) {
  return std::make_shared<OneFile>(std::move(directory), std::move(name), std::move(mark));
}

Error refusal_of_file(const Storage& file) {
  return Error(ErrorCode::kAlreadyExists, "the location is a file: " + file.describe())
      .with_hint("save to a directory");
}

std::optional<StorageEntry> entry_of_one_file(const Storage& storage) {
  const auto* const file = dynamic_cast<const OneFile*>(&storage);
  return file == nullptr ? std::nullopt : std::optional(file->entry());
}

}  // namespace tilestone
