#include "tilestone/format/torch_save/torch_save.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/format/archive/file_archive_internal.h"
#include "tilestone/format/archive/torch_archive.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/read_format_internal.h"

namespace tilestone {
namespace torch_save {
namespace {

constexpr uint64_t kBegin = 64;  // bytes of a file that show what it is instead of an archive

// `begin`: the file's first bytes.
void expect_zip(ByteView begin) {
  if (as_text(begin).starts_with("PK\x03\x04")) return;
  if (as_text(begin).starts_with("version https://git-lfs")) {
    throw Error(ErrorCode::kCorrupt, "this is a pointer of Git LFS, not the file itself")
        .with_hint("fetch the files with `git lfs pull`");
  }
  throw Error(ErrorCode::kUnsupported, "this is not a zip archive, as torch.save writes it")
      .with_hint(
          "files of torch.save from before PyTorch 1.6, and other pickles, are not read: load the "
          "file with torch.load, and save it again");
}

// The entries of the file's dict, or the file's object as the only one.
StateDict tree_of(const Value& root) {
  StateDict state;
  if (root.kind() != Value::Kind::kDict) {
    state["object"] = root;
    return state;
  }
  for (const auto& [key, value] : root.as_dict()) {
    if (key.kind() == Value::Kind::kString) {
      state.entries().emplace_back(key.as_string(), value);
    } else if (key.kind() == Value::Kind::kInt) {
      state.entries().emplace_back(key.as_int(), value);
    } else {
      state.others().emplace_back(key, value);
    }
  }
  return state;
}

Metadata metadata_of(Items items) {
  Metadata metadata;
  for (TensorItem& item : items.tensors) {
    const TensorView& tensor = item.pieces.at(0).data;
    StoredTensor& stored = metadata.tensors.emplace_back(StoredTensor{.key = std::move(item.key),
                                                                      .path = std::move(item.path),
                                                                      .dtype = item.dtype,
                                                                      .shape = item.global_shape,
                                                                      .chunks = {},
                                                                      .order = item.order});
    const Box whole = Box::whole(stored.shape);
    if (whole.empty()) continue;
    stored.chunks.push_back(archive::chunk_of(archive::stood_for(tensor), whole, whole, 0));
  }
  for (ObjectItem& item : items.objects) {
    std::string reason = archive::reason_in(item.value);
    metadata.objects.push_back({.key = std::move(item.key),
                                .path = std::move(item.path),
                                .at = {},
                                .order = item.order,
                                .unsupported = std::move(reason),
                                .value = std::make_shared<const Value>(std::move(item.value))});
  }
  metadata.dict_keys = std::move(items.dict_keys);
  return metadata;
}

class TorchSaveFormat final : public ReadFormat {
 public:
  std::string_view name() const override { return "torch_save"; }
  bool items_may_share_bytes() const override { return true; }

  bool detect(std::span<const std::string> names) const override {
    return contains_name(names, kTorchSaveMark);
  }
  std::vector<std::string> index_files(std::span<const std::string> names) const override {
    if (detect(names)) return {};
    throw Error(ErrorCode::kNotFound, "no file of torch.save");
  }
  std::vector<std::string> self_describing_files(
      std::span<const std::string> names) const override {
    std::vector<std::string> found(names.begin(), names.end());
    std::erase(found, kTorchSaveMark);
    return found;
  }
  std::optional<ProbeRange> next_part(const std::string& name,
                                      const FileParts& read) const override {
    return with_file(name, [&]() -> std::optional<ProbeRange> {
      try {
        return archive::next_part(read);
      } catch (const Error&) {
        const auto begin = read.parts.find(0);
        if (begin == read.parts.end()) return ProbeRange{0, std::min(read.size, kBegin)};
        expect_zip(begin->second);
        throw;
      }
    });
  }
  Metadata parse_index(const DirectoryFiles& files) const override {
    if (files.parts.size() != 1) throw Error(ErrorCode::kNotFound, "no file of torch.save");
    const auto& [name, parts] = *files.parts.begin();
    return with_file(name, [&, &name = name, &parts = parts] {
      const Value root = archive::read_file(parts);
      Metadata metadata = metadata_of(pytorch_dialect()->to_items(tree_of(root), *this));
      metadata.writer = "torch.save";
      metadata.files = {name};
      metadata.index();
      return metadata;
    });
  }

  // Objects are in the index.
  Value parse_object(const SharedBytes& item) const override { return read_torch_archive(item); }
  std::optional<ItemFault> verify_object(ByteView) const override { return std::nullopt; }
};

}  // namespace
}  // namespace torch_save

std::shared_ptr<const Format> torch_save_format() {
  return std::make_shared<torch_save::TorchSaveFormat>();
}

bool is_torch_save_name(std::string_view name) {
  constexpr std::string_view kEndings[] = {".pt", ".pth", ".bin", ".ckpt"};
  return std::any_of(std::begin(kEndings), std::end(kEndings),
                     [&](std::string_view ending) { return name.ends_with(ending); });
}

}  // namespace tilestone
