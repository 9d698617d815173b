#include "tilestone/engine/checkpoint/repair_from_index_internal.h"

#include <utility>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/megatron_mark.h"

namespace tilestone::engine {
namespace {

std::string switch_of(const Manifest& manifest) {
  for (const IndexSum& sum : manifest.index) {
    if (sum.role == IndexRole::kSwitch) return sum.name;
  }
  return {};
}

// Null if the recipe contains elements, or if its bytes are not those that the save wrote at `at`.
std::shared_ptr<const Bytes> as_saved(const ItemRecipe& recipe, const ItemLocation& at) {
  auto bytes = std::make_shared<Bytes>();
  for (const Segment& segment : recipe.segments) {
    if (segment.literal == nullptr && segment.size > 0) return nullptr;
    if (segment.literal == nullptr) continue;
    // The checksum of no elements is 0, so nothing is inserted into the literal.
    bytes->insert(bytes->end(), segment.literal->view().begin(), segment.literal->view().end());
  }
  if (!at.checksums || bytes->size() != at.length) return nullptr;
  return crc32(*bytes) == at.checksums->item_crc32 ? bytes : nullptr;
}

// Damage of the index, which verify reports, is the same as bytes that differ.
template <typename Make>
std::optional<FromIndex::Encoded> encoded(const ItemLocation& at, std::string file,
                                          const Make& recipe) {
  try {
    auto bytes = as_saved(recipe(), at);
    if (bytes == nullptr) return std::nullopt;
    return FromIndex::Encoded{std::move(file), std::move(bytes)};
  } catch (const Error&) {
    return std::nullopt;
  }
}

}  // namespace

ItemEncoder& FromIndex::encoder() {
  if (encoder_ == nullptr) encoder_ = opened_.format->encoder();
  return *encoder_;
}

std::optional<FromIndex::Encoded> FromIndex::chunk(const StoredTensor& tensor,
                                                   const StoredChunk& chunk,
                                                   const ItemLocation& at) {
  if (!chunk.box.empty()) return std::nullopt;
  TensorItem item;
  item.key = tensor.key;
  item.dtype = tensor.dtype;
  item.global_shape = tensor.shape;
  item.pieces = {{chunk.box, TensorView::without_data(tensor.dtype, chunk.box.shape)}};
  return encoded(at, switch_of(*opened_.manifest),
                 [&] { return encoder().tensor(item, item.pieces.front(), 0); });
}

std::optional<FromIndex::Encoded> FromIndex::common(const ItemLocation& at) {
  return encoded(at, std::string(kMegatronCommon), [&] {
    auto common = opened_.dialect->parse_common(opened_.files);
    if (!common) return ItemRecipe();
    ObjectItem item;
    item.key = opened_.dialect->common_object();
    item.value = opened_.dialect->common_as_object(*std::move(common));
    return encoder().object(item, 0);
  });
}

}  // namespace tilestone::engine
