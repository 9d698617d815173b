#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/engine/read/items_internal.h"
#include "tilestone/engine/read/objects_internal.h"
#include "tilestone/format/dialect/dialect.h"

namespace tilestone::engine {

Value parse_object(const Opened& opened, const SharedBytes& item) {
  return opened.dialect->object_of(opened.format->parse_object(item), *opened.format);
}

std::optional<Value> read_common(const ReadContext& context, const Opened& opened) {
  if (auto common = opened.dialect->parse_common(opened.files)) return common;
  if (opened.dialect->common_object().empty()) return std::nullopt;
  if (!opened.common) {
    throw Error(ErrorCode::kCorrupt, "the checkpoint's common state is missing")
        .with_key(opened.dialect->common_object());
  }
  const StoredObject* const stored = &*opened.common;
  return with_key_and_file(stored->key, opened.metadata.files[stored->at.file], [&] {
    std::vector<Bytes> bytes = read_objects(context, std::vector{ObjectRead{stored}});
    Value common = parse_object(opened, std::move(bytes.front()));
    if (common.kind() == Value::Kind::kDict) return common;
    throw Error(ErrorCode::kCorrupt,
                "the common state is a " + std::string(to_string(common.kind())) + ", not a dict");
  });
}

}  // namespace tilestone::engine
