#include "tilestone/format/format_testing.h"

#include <cstring>
#include <stdexcept>
#include <utility>

#include "tilestone/base/checksum.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone {
namespace {

Bytes payload(const Segment& segment) {
  Bytes bytes(segment.tensor->bytes());
  pack_range(segment.tensor->strided_view(), 0, bytes);
  bytes.resize(segment.size);
  if (segment.padding) segment.padding->spread(0, bytes);
  return bytes;
}

}  // namespace

Bytes with_crc32(const Literal& literal, uint32_t crc) {
  Bytes bytes = literal.bytes;
  for (uint64_t at : literal.crc32_at) std::memcpy(bytes.data() + at, &crc, sizeof(crc));
  return bytes;
}

Bytes render(const ItemRecipe& recipe) {
  Bytes out(recipe.padding);
  uint32_t crc = 0;
  for (const Segment& segment : recipe.segments) {
    Bytes bytes;
    if (segment.tensor != nullptr) {
      bytes = payload(segment);
      crc = crc32(bytes);
    } else {
      bytes = with_crc32(*segment.literal, crc);
    }
    if (bytes.size() != segment.size) throw std::logic_error("the segment has the wrong size");
    out.insert(out.end(), bytes.begin(), bytes.end());
  }
  if (out.size() != recipe.padding + recipe.length) {
    throw std::logic_error("the item has the wrong length");
  }
  return out;
}

namespace {

class FramingEncoder final : public ItemEncoder {
 public:
  explicit FramingEncoder(std::unique_ptr<ItemEncoder> inner) : inner_(std::move(inner)) {}
  Bytes begin_file(std::span<const FileItem> items) override {
    ByteWriter out;
    out.string("BEGIN");
    for (const FileItem& item : items) {
      out.string(item.object != nullptr ? item.object->key : item.tensor->key);
    }
    return std::move(out).take();
  }
  ItemRecipe tensor(const TensorItem& item, const Piece& piece, uint64_t file_offset) override {
    return inner_->tensor(item, piece, file_offset);
  }
  ItemRecipe object(const ObjectItem& item, uint64_t file_offset) override {
    return inner_->object(item, file_offset);
  }

 private:
  const std::unique_ptr<ItemEncoder> inner_;
};

class FramedFormat final : public Format {
 public:
  explicit FramedFormat(std::shared_ptr<const Format> inner) : inner_(std::move(inner)) {}

  bool files_have_headers() const override { return true; }
  std::unique_ptr<ItemEncoder> encoder() const override {
    return std::make_unique<FramingEncoder>(inner_->encoder());
  }

  std::string_view name() const override { return inner_->name(); }
  int backend_version() const override { return inner_->backend_version(); }
  void check(const Items& items) const override { inner_->check(items); }
  Index encode_index(const Metadata& metadata) const override {
    return inner_->encode_index(metadata);
  }
  bool detect(std::span<const std::string> names) const override { return inner_->detect(names); }
  std::vector<std::string> index_files(std::span<const std::string> names) const override {
    return inner_->index_files(names);
  }
  std::vector<std::string> rank_local_files(std::span<const std::string> names) const override {
    return inner_->rank_local_files(names);
  }
  Metadata parse_index(const DirectoryFiles& files) const override {
    return inner_->parse_index(files);
  }
  std::vector<ProbeRange> probe(const ItemLocation& at) const override { return inner_->probe(at); }
  StoredPayload parse_tensor(const StoredTensor& tensor, const StoredChunk& chunk,
                             const ItemLocation& at,
                             std::span<const ByteView> probed) const override {
    return inner_->parse_tensor(tensor, chunk, at, probed);
  }
  Value parse_object(const SharedBytes& item) const override { return inner_->parse_object(item); }
  Bytes decode(Codec codec, ByteView item, uint64_t max_size) const override {
    return inner_->decode(codec, item, max_size);
  }
  std::optional<ItemFault> verify_tensor(const StoredTensor& tensor, const StoredChunk& chunk,
                                         ByteView item) const override {
    return inner_->verify_tensor(tensor, chunk, item);
  }
  std::optional<ItemFault> verify_object(ByteView item) const override {
    return inner_->verify_object(item);
  }

 private:
  const std::shared_ptr<const Format> inner_;
};

}  // namespace

std::shared_ptr<const Format> framed_format(std::shared_ptr<const Format> inner) {
  return std::make_shared<FramedFormat>(std::move(inner));
}

}  // namespace tilestone
