#include "tilestone/format/archive/pickle_schema_internal.h"

#include "tilestone/base/error.h"

namespace tilestone::archive {
namespace {

std::string_view kind_name(NodeKind kind) {
  switch (kind) {
    case NodeKind::kNone:
      return "None";
    case NodeKind::kBool:
      return "a bool";
    case NodeKind::kInt:
    case NodeKind::kLong:
      return "an int";
    case NodeKind::kFloat:
      return "a float";
    case NodeKind::kString:
      return "a string";
    case NodeKind::kBytes:
    case NodeKind::kByteArray:
      return "bytes";
    case NodeKind::kGlobal:
    case NodeKind::kAttribute:
      return "a class or function";
    case NodeKind::kTuple:
      return "a tuple";
    case NodeKind::kList:
      return "a list";
    case NodeKind::kDict:
      return "a dict";
    case NodeKind::kSet:
    case NodeKind::kFrozenSet:
      return "a set";
    case NodeKind::kCall:
    case NodeKind::kNew:
      return "an object";
    case NodeKind::kPersistent:
      return "a persistent id";
  }
  return "?";
}

[[noreturn]] void wrong(const Pickle& pickle, NodeId id, std::string_view what,
                        std::string_view expected) {
  throw Error(ErrorCode::kCorrupt,
              std::string(what) + " is " + describe(pickle, id) + ", not " + std::string(expected));
}

}  // namespace

std::string describe(const Pickle& pickle, NodeId id) {
  if (id == kNoNode) return "absent";
  constexpr size_t kMaxNameBytes = 200;
  const NodeKind kind = pickle.kind(id);
  const bool object = kind == NodeKind::kCall || kind == NodeKind::kNew;
  if (!object && !pickle.is_named(id)) return std::string(kind_name(kind));
  const NodeId global = object ? pickle.callable(id) : id;
  std::string name(pickle.module(global).substr(0, kMaxNameBytes));
  name += '.';
  name += pickle.qualified_name(global).substr(0, kMaxNameBytes);
  return object ? "an object of " + name : name;
}

Dims read_dims(const Pickle& pickle, NodeId id, std::string_view what) {
  if (id == kNoNode) wrong(pickle, id, what, "a shape");
  if (pickle.is(id, NodeKind::kCall) && pickle.is_global(pickle.callable(id), "torch", "Size")) {
    const auto args = pickle.items(pickle.args(id));
    if (args.size() == 1) id = args[0];
  }
  if (!pickle.is(id, NodeKind::kTuple) && !pickle.is(id, NodeKind::kList)) {
    wrong(pickle, id, what, "a tuple of ints");
  }
  const auto elements = pickle.items(id);
  Dims dims(elements.size(), 0);
  int64_t* at = dims.begin();
  for (NodeId element : elements) *at++ = read_count(pickle, element, what);
  return dims;
}

int64_t read_large_count(const Pickle& pickle, NodeId id, std::string_view what) {
  if (id == kNoNode || !pickle.is(id, NodeKind::kInt)) wrong(pickle, id, what, "an int");
  const int64_t value = pickle.integer(id);
  if (value < 0) {
    throw Error(ErrorCode::kCorrupt, std::string(what) + " is negative: " + std::to_string(value));
  }
  return value;
}

std::string_view read_string(const Pickle& pickle, NodeId id, std::string_view what) {
  if (id == kNoNode || !pickle.is(id, NodeKind::kString)) wrong(pickle, id, what, "a string");
  return pickle.text(id);
}

std::optional<DType> read_dtype(const Pickle& pickle, NodeId id) {
  if (id == kNoNode || !pickle.is(id, NodeKind::kGlobal)) return std::nullopt;
  if (pickle.module(id) != "torch") return std::nullopt;
  return parse_dtype(pickle.name(id));
}

}  // namespace tilestone::archive
