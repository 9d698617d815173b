#include <algorithm>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/run/torch_save_storage_internal.h"
#include "tilestone/format/torch_save/torch_save.h"
#include "tilestone/geometry/strided_copy.h"
#include "tilestone/storage/directories.h"
#include "tilestone/storage/mapped_file.h"
#include "tilestone/storage/one_file.h"
#include "tilestone/storage/read_only.h"

namespace tilestone::engine {
namespace {

// A file whose bytes are made when they are read.
class MadeFile final : public ReadableFile {
 public:
  using Fill = std::function<void(uint64_t offset, MutableByteView out)>;
  MadeFile(std::string name, uint64_t size, Fill fill)
      : name_(std::move(name)), size_(size), fill_(std::move(fill)) {}

  uint64_t size() const override { return size_; }
  const std::string& name() const override { return name_; }

  void read(const ReadOp& op, size_t index, const ReadDone& done) const {
    if (op.offset > size_ || op.size > size_ - op.offset) {
      throw Error(ErrorCode::kCorrupt, "a range extends beyond the end of the file")
          .with_file(name_);
    }
    Bytes own(op.target == nullptr ? op.size : 0);
    const MutableByteView out(op.target == nullptr ? own.data() : op.target, op.size);
    fill_(op.offset, out);
    set_checksums(op, out);
    done(index, out);
  }

 private:
  const std::string name_;
  const uint64_t size_;
  const Fill fill_;
};

// What is beside the file.
class BesideFile final : public Directories {
 public:
  BesideFile(std::shared_ptr<Storage> directory, std::string name)
      : entry_{std::move(directory), std::move(name)} {}

  void make(const std::string& name) override { refuse(name); }
  void remove(const std::string& name) override { refuse(name); }
  void settle(const std::string&) override {}
  bool can_exchange() override { return false; }
  void exchange(const std::string& a, const std::string&) override { refuse(a); }
  void rename(const std::string& from, const std::string&) override { refuse(from); }
  void rename_file(const std::string& from, const std::string&, bool) override { refuse(from); }
  void copy_permissions(const std::string& name, const std::string&) override { refuse(name); }
  std::optional<StorageEntry> parent() override { return entry_; }

 private:
  [[noreturn]] static void refuse(const std::string& name) {
    throw Error(ErrorCode::kUnsupported, "a file has no directories").with_file(name);
  }

  const StorageEntry entry_;
};

class TorchSaveStorage final : public ReadOnlyStorage {
 public:
  TorchSaveStorage(std::shared_ptr<Storage> directory, std::string name, std::string path)
      : directory_(directory),
        file_(one_file(directory, name)),
        beside_(std::move(directory), name),
        name_(std::move(name)),
        path_(std::move(path)) {}

  StorageFacts facts() const override {
    StorageFacts facts = file_->facts();
    facts.shared_cache = false;
    return facts;
  }
  Directories* directories() override { return &beside_; }

  std::unique_ptr<ReadableFile> open(const std::string& name) override {
    const TorchSaveFile& shown = contents();
    if (is_one_of(shown.names, name)) return file_->open(name_);
    if (name == shown.index_name) {
      return std::make_unique<MadeFile>(
          name, shown.index.size(), [&](uint64_t offset, MutableByteView out) {
            const ByteView part = ByteView(shown.index).subspan(offset, out.size());
            std::copy(part.begin(), part.end(), out.begin());
          });
    }
    if (name == shown.packed_name) {
      return std::make_unique<MadeFile>(
          name, shown.packed_bytes,
          [&](uint64_t offset, MutableByteView out) { pack(shown.packed, offset, out); });
    }
    throw Error(ErrorCode::kNotFound, "the file of torch.save has no such part").with_file(name);
  }

  void read(std::span<const ReadOp> ops, const ReadOptions& options,
            const ReadDone& done) override {
    std::vector<ReadOp> stored;
    std::vector<size_t> indices;
    for (size_t i = 0; i < ops.size(); ++i) {
      if (const auto* const made = dynamic_cast<const MadeFile*>(ops[i].file)) {
        made->read(ops[i], i, done);
      } else {
        stored.push_back(ops[i]);
        indices.push_back(i);
      }
    }
    if (stored.empty()) return;
    directory_->read(stored, options, [&](size_t i, ByteView bytes) { done(indices[i], bytes); });
  }

  std::optional<FileInfo> stat(const std::string& name) override {
    const TorchSaveFile& shown = contents();
    if (is_one_of(shown.names, name)) return file_->stat(name_);
    if (name == shown.index_name) return FileInfo{shown.index.size()};
    if (name == shown.packed_name) return FileInfo{shown.packed_bytes};
    return std::nullopt;
  }
  Listing listing(const std::string& prefix, Depth) override {
    const TorchSaveFile& shown = contents();
    std::vector<std::string> names = shown.names;
    names.push_back(shown.index_name);
    names.push_back(shown.packed_name);
    std::erase_if(names, [&](const std::string& name) { return !name.starts_with(prefix); });
    std::sort(names.begin(), names.end());
    return {std::move(names), {}};
  }

 private:
  Error refusal() const override { return refusal_of_file(*file_); }

  static bool is_one_of(const std::vector<std::string>& names, const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  }

  static void pack(const std::vector<TorchSaveFile::Packed>& packed, uint64_t offset,
                   MutableByteView out) {
    auto next = std::partition_point(packed.begin(), packed.end(), [&](const auto& item) {
      return item.offset + item.size <= offset;
    });
    while (!out.empty()) {
      const uint64_t begin = offset - next->offset;
      const uint64_t size = std::min<uint64_t>(out.size(), next->size - begin);
      if (!next->bytes.empty()) {
        const ByteView part = ByteView(next->bytes).subspan(begin, size);
        std::copy(part.begin(), part.end(), out.begin());
      } else {
        pack_range(next->tensor.strided_view(), begin, out.first(size));
      }
      out = out.subspan(size);
      offset += size;
      ++next;
    }
  }

  // The directory decides whether the file may be read: it may be a link.
  const TorchSaveFile& contents() {
    const std::lock_guard lock(mutex_);
    if (!contents_) {
      static_cast<void>(file_->open(name_));
      mapped_.emplace(path_);
      contents_ = describe_torch_save(mapped_->bytes(), name_);
    }
    return *contents_;
  }

  const std::shared_ptr<Storage> directory_, file_;
  BesideFile beside_;
  const std::string name_, path_;
  std::mutex mutex_;
  std::optional<MappedFile> mapped_;
  std::optional<TorchSaveFile> contents_;
};

}  // namespace

std::shared_ptr<Storage> torch_save_storage(std::shared_ptr<Storage> directory, std::string name,
                                            std::string path) {
  return std::make_shared<TorchSaveStorage>(std::move(directory), std::move(name), std::move(path));
}

}  // namespace tilestone::engine
