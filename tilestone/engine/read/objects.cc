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

Value read_object(const ReadContext& context, const Opened& opened, const StoredObject& object) {
  const ObjectRead read{&object};
  return with_key_and_file(object.key, opened.metadata.files[object.at.file], [&] {
    return parse_object(opened, std::move(read_objects(context, {&read, 1}).front()));
  });
}

std::optional<Value> read_common(const ReadContext& context, const Opened& opened, bool leave_out) {
  if (leave_out && !opened.dialect->common_object().empty()) return Value::dict({});
  if (leave_out) return std::nullopt;
  if (auto common = opened.dialect->parse_common(opened.files)) return common;
  if (opened.dialect->common_object().empty()) return std::nullopt;
  if (!opened.common) {
    throw Error(ErrorCode::kCorrupt, "the checkpoint's common state is missing")
        .with_key(opened.dialect->common_object());
  }
  Value common = read_object(context, opened, *opened.common);
  if (common.kind() == Value::Kind::kDict) return common;
  throw Error(ErrorCode::kCorrupt,
              "the common state is a " + std::string(to_string(common.kind())) + ", not a dict")
      .with_key(opened.common->key)
      .with_file(opened.metadata.files[opened.common->at.file]);
}

}  // namespace tilestone::engine
