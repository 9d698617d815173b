// The encoding of attributes: each value is one byte for its kind, followed by its content.
#include <limits>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/plan/wire_internal.h"

namespace tilestone::wire {
namespace {

constexpr int kMaxDepth = 16;

enum Tag : uint8_t {
  kNull = 0,
  kFalse = 1,
  kTrue = 2,
  kInt = 3,
  kFloat = 4,
  kString = 5,
  kBytes = 6,
  kList = 7,
  kTuple = 8,
  kDict = 9,
};

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, what);
}

void write_value(ByteWriter& out, const Value& value, int depth);

void write_items(ByteWriter& out, Tag tag, const Value::List& items, int depth) {
  out.u8(tag);
  out.varint(items.size());
  for (const Value& item : items) write_value(out, item, depth + 1);
}

void write_dict(ByteWriter& out, const Value& dict, int depth) {
  if (dict.is_ordered_dict()) refuse("an attribute contains an OrderedDict; use a dict instead");
  out.u8(kDict);
  out.varint(dict.as_dict().size());
  for (const auto& [key, item] : dict.as_dict()) {
    if (key.kind() != Value::Kind::kString && key.kind() != Value::Kind::kInt) {
      refuse("an attribute contains a dict with a key that is a " +
             std::string(to_string(key.kind())) + "; keys must be text or ints");
    }
    write_value(out, key, depth + 1);
    write_value(out, item, depth + 1);
  }
}

void write_value(ByteWriter& out, const Value& value, int depth) {
  if (depth > kMaxDepth) refuse("an attribute is nested deeper than 16 levels");
  switch (value.kind()) {
    case Value::Kind::kNull:
      return out.u8(kNull);
    case Value::Kind::kBool:
      return out.u8(value.as_bool() ? kTrue : kFalse);
    case Value::Kind::kInt:
      out.u8(kInt);
      return out.i64(value.as_int());
    case Value::Kind::kFloat:
      out.u8(kFloat);
      return out.f64(value.as_float());
    case Value::Kind::kString:
      out.u8(kString);
      return out.string(value.as_string());
    case Value::Kind::kBytes:
      out.u8(kBytes);
      return out.blob(value.as_bytes());
    case Value::Kind::kList:
      return write_items(out, kList, value.items(), depth);
    case Value::Kind::kTuple:
      return write_items(out, kTuple, value.items(), depth);
    case Value::Kind::kDict:
      return write_dict(out, value, depth);
    default:
      refuse("an attribute contains a value that is a " + std::string(to_string(value.kind())) +
             "; expected null, bool, 64-bit int, float, string, bytes, list, tuple or dict");
  }
}

Value read_value(ByteReader& in, int depth);

Value::List read_items(ByteReader& in, int depth) {
  Value::List items(in.count());
  for (Value& item : items) item = read_value(in, depth + 1);
  return items;
}

Value read_dict(ByteReader& in, int depth) {
  Value::Dict items(in.count(2));
  for (auto& [key, item] : items) {
    key = read_value(in, depth + 1);
    if (key.kind() != Value::Kind::kString && key.kind() != Value::Kind::kInt) {
      in.fail("a dict's key is neither text nor int");
    }
    item = read_value(in, depth + 1);
  }
  return Value::dict(std::move(items));
}

// The recursion is limited to the depth that the writer allows.
Value read_value(ByteReader& in, int depth) {
  if (depth > kMaxDepth) in.fail("an attribute is nested deeper than 16 levels");
  switch (in.u8()) {
    case kNull:
      return {};
    case kFalse:
      return false;
    case kTrue:
      return true;
    case kInt:
      return in.i64();
    case kFloat:
      return in.f64();
    case kString:
      return std::string(in.string());
    case kBytes: {
      const ByteView bytes = in.blob();
      return Bytes(bytes.begin(), bytes.end());
    }
    case kList:
      return Value::list(read_items(in, depth));
    case kTuple:
      return Value::tuple(read_items(in, depth));
    case kDict:
      return read_dict(in, depth);
    default:
      in.fail("an attribute has an unknown kind");
  }
}

}  // namespace

void write_attributes(ByteWriter& out, const Attributes& attributes) {
  out.varint(attributes.size());
  for (const auto& [name, value] : attributes) {
    out.string(name);
    try {
      write_value(out, value, 1);
    } catch (const Error& error) {
      throw Error(error.code(), "attribute \"" + name + "\": " + error.message());
    }
  }
}

Attributes read_attributes(ByteReader& in) {
  Attributes attributes;
  for (uint64_t left = in.count(2); left > 0; --left) {
    std::string name(in.string());
    if (!attributes.empty() && name <= attributes.rbegin()->first) {
      in.fail("the names of attributes are not in ascending order");
    }
    attributes.emplace_hint(attributes.end(), std::move(name), read_value(in, 1));
  }
  return attributes;
}

}  // namespace tilestone::wire
