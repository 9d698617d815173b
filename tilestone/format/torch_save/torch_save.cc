#include "tilestone/format/torch_save/torch_save.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <utility>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/format/archive/archive_reader_internal.h"
#include "tilestone/format/archive/torch_archive.h"
#include "tilestone/format/archive/value_check_internal.h"
#include "tilestone/format/archive/zip_reader_internal.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/read_format_internal.h"
#include "tilestone/plan/receipt.h"

namespace tilestone {
namespace torch_save {
namespace {

constexpr std::string_view kIndexEnd = ":torch_save";
constexpr std::string_view kPackedEnd = ":packed";

class TorchSaveFormat final : public ReadFormat {
 public:
  std::string_view name() const override { return "torch_save"; }

  bool detect(std::span<const std::string> names) const override { return !indexes(names).empty(); }
  std::vector<std::string> index_files(std::span<const std::string> names) const override {
    std::vector<std::string> found = indexes(names);
    if (found.empty()) throw Error(ErrorCode::kNotFound, "no file of torch.save");
    return found;
  }
  Metadata parse_index(const DirectoryFiles& files) const override {
    const std::string name = index_files(files.names).front();
    const auto found = files.contents.find(name);
    if (found == files.contents.end()) {
      throw Error(ErrorCode::kInternal, "the index has not been read").with_file(name);
    }
    try {
      ByteReader reader(found->second, "index of a file of torch.save");
      const std::string_view receipt = reader.string();
      Metadata metadata = merge_receipts({Receipt::decode(as_bytes(receipt))});
      std::map<std::string, std::string, std::less<>> reasons;
      for (uint64_t left = reader.count(2); left > 0; --left) {
        const std::string_view key = reader.string();
        reasons.emplace(key, reader.string());
      }
      for (StoredObject& object : metadata.objects) {
        const auto reason = reasons.find(object.key);
        if (reason != reasons.end()) object.unsupported = reason->second;
      }
      metadata.writer = "torch.save";
      for (StoredTensor& tensor : metadata.tensors) {
        for (StoredChunk& chunk : tensor.chunks) drop_unknown(chunk.at);
      }
      metadata.index();
      return metadata;
    } catch (const Error& error) {
      throw Error(ErrorCode::kCorrupt, error.message()).with_file(name).with_key(error.key());
    }
  }

  Value parse_object(const SharedBytes& item) const override { return read_torch_archive(item); }
  std::optional<ItemFault> verify_object(ByteView item) const override {
    return archive::check_archive(item);
  }

 private:
  static std::vector<std::string> indexes(std::span<const std::string> names) {
    std::vector<std::string> found;
    for (const std::string& name : names) {
      if (name.ends_with(kIndexEnd)) found.push_back(name);
    }
    return found;
  }

  // See checksums_of().
  static void drop_unknown(ItemLocation& at) {
    if (at.length > 0 && at.checksums && at.checksums->payload_offset > 0) at.checksums.reset();
  }
};

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

// `reasons`: by key, why objects can't be read.
Items items_of(const Value& root, std::map<std::string, std::string>& reasons) {
  const auto dialect = pytorch_dialect();
  const auto format = torch_save_format();
  try {
    return dialect->to_items(tree_of(root), *format);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInvalidArgument) throw;
    Items items = dialect->to_items(tree_of(archive::readable(root)), *format);
    for (const ObjectItem& item : items.objects) reasons[item.key] = archive::reason_in(item.value);
    return items;
  }
}

class Describer {
 public:
  Describer(ByteView bytes, std::string name) : bytes_(bytes), name_(std::move(name)) {
    file_.index_name = name_ + std::string(kIndexEnd);
    file_.packed_name = name_ + std::string(kPackedEnd);
  }

  TorchSaveFile describe() && {
    find_records();
    std::map<std::string, std::string> reasons;
    const Items items = items_of(archive::view_archive(bytes_), reasons);
    receipt_.dict_keys = items.dict_keys;
    for (const TensorItem& item : items.tensors) add(item);
    for (const ObjectItem& item : items.objects) {
      Bytes bytes = write_torch_archive(item.value);
      const uint32_t crc = crc32(bytes);
      receipt_.objects.push_back({item.key, item.path,
                                  packed({0, bytes.size(), std::move(bytes), {}}, {0, 0, crc}), 0,
                                  item.order});
    }
    receipt_.files[0] = {file_.packed_name, file_.packed_bytes};
    ByteWriter index;
    index.blob(receipt_.encode());
    index.varint(reasons.size());
    for (const auto& [key, reason] : reasons) {
      index.string(key);
      index.string(reason);
    }
    file_.index = std::move(index).take();
    return std::move(file_);
  }

 private:
  // The CRC-32s of the records' bytes, by where they begin.
  void find_records() {
    const archive::ItemBytes whole(bytes_);
    const auto directory = archive::ZipDirectory::parse(whole);
    if (!directory || !directory->has_checksums()) return;
    for (const archive::ZipRecord& record : directory->records()) {
      const auto offset = directory->data_offset(whole, record);
      if (offset) records_[*offset] = {record.size, record.crc32};
    }
  }

  void add(const TensorItem& item) {
    const TensorView& tensor = item.pieces.at(0).data;
    const auto number = static_cast<uint32_t>(receipt_.tensors.size());
    receipt_.tensors.push_back({item.key, item.path, item.dtype, item.global_shape, item.order});
    const bool is_run = tensor.strides == contiguous_strides(tensor.shape);
    const ReceiptItem at = is_run && tensor.bytes() > 0 && is_in_file(tensor)
                               ? in_place(tensor)
                               : packed({0, tensor.bytes(), {}, tensor}, unknown(tensor.bytes()));
    receipt_.chunks.push_back({number, Box::whole(item.global_shape), at});
  }

  // Not, if the elements were computed: of a lazily conjugated or negated tensor.
  bool is_in_file(const TensorView& tensor) const {
    const std::less_equal<> before;
    return before(bytes_.data(), tensor.data) &&
           before(tensor.data + tensor.bytes(), bytes_.data() + bytes_.size());
  }

  // Receipt has no items without checksums: this stands for them (drop_unknown).
  static ItemChecksums unknown(uint64_t size) { return {size, 0, 0}; }

  ItemChecksums checksums_of(uint64_t offset, uint64_t size) const {
    const auto found = records_.find(offset);
    if (found == records_.end() || found->second.size != size) return unknown(size);
    return {0, found->second.crc32, found->second.crc32};
  }

  ReceiptItem in_place(const TensorView& tensor) {
    const auto offset = static_cast<uint64_t>(tensor.data - bytes_.data());
    const uint64_t size = tensor.bytes();
    return {name_for(offset, size), offset, size, checksums_of(offset, size)};
  }

  // The first name of the file under which no other tensor has some of these bytes.
  uint32_t name_for(uint64_t begin, uint64_t size) {
    for (size_t i = 0;; ++i) {
      if (i == taken_.size()) {
        taken_.emplace_back();
        file_.names.push_back(i == 0 ? name_ : name_ + ":" + std::to_string(i + 1));
        receipt_.files.push_back({file_.names.back(), bytes_.size()});
      }
      std::map<uint64_t, uint64_t>& taken = taken_[i];
      const auto next = taken.lower_bound(begin);
      const bool before = next != taken.begin() && std::prev(next)->second > begin;
      const bool after = next != taken.end() && next->first < begin + size;
      if (before || after) continue;
      taken[begin] = begin + size;
      return static_cast<uint32_t>(i + 1);
    }
  }

  ReceiptItem packed(TorchSaveFile::Packed item, const ItemChecksums& checksums) {
    item.offset = file_.packed_bytes;
    file_.packed_bytes += item.size;
    const ReceiptItem at{0, item.offset, item.size, checksums};
    file_.packed.push_back(std::move(item));
    return at;
  }

  struct Record {
    uint64_t size = 0;
    uint32_t crc32 = 0;
  };

  const ByteView bytes_;
  const std::string name_;
  TorchSaveFile file_;
  Receipt receipt_ = {.files = {{}}};  // the first is what is packed
  std::map<uint64_t, Record> records_;
  std::vector<std::map<uint64_t, uint64_t>> taken_;  // by name: beginnings and ends of tensors
};

void expect_zip(ByteView bytes) {
  constexpr std::string_view kMagic = "PK\x03\x04";
  if (bytes.size() >= kMagic.size() && as_text(bytes.first(kMagic.size())) == kMagic) return;
  if (as_text(bytes).starts_with("version https://git-lfs")) {
    throw Error(ErrorCode::kCorrupt, "this is a pointer of Git LFS, not the file itself")
        .with_hint("fetch the files with `git lfs pull`");
  }
  throw Error(ErrorCode::kUnsupported, "this is not a zip archive, as torch.save writes it")
      .with_hint(
          "files of torch.save from before PyTorch 1.6, and other pickles, are not read: load the "
          "file with torch.load, and save it again");
}

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

TorchSaveFile describe_torch_save(ByteView archive, const std::string& name) {
  return with_file(name, [&] {
    torch_save::expect_zip(archive);
    return torch_save::Describer(archive, name).describe();
  });
}

}  // namespace tilestone
