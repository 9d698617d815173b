#include "tilestone/state/value.h"

#include <algorithm>
#include <bit>

#include "tilestone/base/error.h"
#include "tilestone/geometry/strided_copy.h"
#include "tilestone/state/value_children.h"

namespace tilestone {

struct Value::Sequence {
  List items;
  bool tuple;
  uint32_t depth = 0;
};

struct Value::Mapping {
  Dict items;
  bool ordered;
  Value attributes;
  uint32_t depth = 0;
};

struct Value::TensorBox {
  TensorView tensor;
  Autograd autograd;
};

struct Value::OpaqueBox {
  Opaque opaque;
  uint32_t depth = 0;
};

Value::Value() noexcept = default;
Value::Value(std::nullptr_t) noexcept {}
Value::Value(bool value) noexcept : data_(value) {}
Value::Value(int value) noexcept : data_(int64_t{value}) {}
Value::Value(int64_t value) noexcept : data_(value) {}
Value::Value(double value) noexcept : data_(value) {}
Value::Value(const char* text) : data_(std::string(text)) {}
Value::Value(std::string text) noexcept : data_(std::move(text)) {}
Value::Value(BigInt value) noexcept : data_(std::move(value)) {}
Value::Value(Bytes bytes) : data_(std::make_shared<const Bytes>(std::move(bytes))) {}
Value::Value(DType dtype) noexcept : data_(dtype) {}
Value::Value(Pickled pickled) : data_(std::make_shared<const Pickled>(std::move(pickled))) {}
Value::Value(const Value&) = default;
Value::Value(Value&&) noexcept = default;
Value& Value::operator=(const Value&) = default;
Value& Value::operator=(Value&&) noexcept = default;
Value::~Value() = default;

Value::Value(uint64_t value) {
  if (value <= static_cast<uint64_t>(INT64_MAX)) {
    data_ = static_cast<int64_t>(value);
    return;
  }
  BigInt big;
  for (int i = 0; i < 8; ++i) big.bytes.push_back(static_cast<std::byte>(value >> (8 * i)));
  big.bytes.push_back(std::byte{0});
  data_ = std::move(big);
}

Value::Value(TensorView tensor) : Value(std::move(tensor), Autograd{}) {}

Value::Value(TensorView tensor, Autograd autograd) {
  if (tensor.device != nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                "a value can't hold a tensor in the memory of " + tensor.device->device());
  }
  if (!tensor.has_data()) {
    throw Error(ErrorCode::kInvalidArgument, "a value can't hold a tensor without data");
  }
  data_ = std::make_shared<const TensorBox>(TensorBox{std::move(tensor), autograd});
}

Value::Value(Opaque opaque) : Value(container(OpaqueBox{std::move(opaque)})) {}

template <typename Box>
Value Value::container(Box box) {
  const auto made = std::make_shared<Box>(std::move(box));
  Value value;
  value.data_ = std::shared_ptr<const Box>(made);
  for_each_child(
      value, [&](const Value& child) { made->depth = std::max(made->depth, child.depth() + 1); });
  if (made->depth <= kMaxValueDepth) return value;
  throw Error(ErrorCode::kInvalidArgument,
              "a value is nested deeper than " + std::to_string(kMaxValueDepth) + " levels");
}

uint32_t Value::depth() const {
  return std::visit(
      [](const auto& content) -> uint32_t {
        if constexpr (requires { content->depth; }) return content->depth;
        return 0;
      },
      data_);
}

Value Value::list(List items) { return container(Sequence{std::move(items), false}); }
Value Value::tuple(List items) { return container(Sequence{std::move(items), true}); }
Value Value::dict(Dict items) { return container(Mapping{std::move(items), false, Value()}); }
Value Value::ordered_dict(Dict items, Value attributes) {
  return container(Mapping{std::move(items), true, std::move(attributes)});
}

Value::Kind Value::kind() const {
  constexpr Kind kByIndex[] = {Kind::kNull,   Kind::kBool,   Kind::kInt,    Kind::kFloat,
                               Kind::kString, Kind::kBigInt, Kind::kDType,  Kind::kBytes,
                               Kind::kList,   Kind::kDict,   Kind::kTensor, Kind::kOpaque,
                               Kind::kPickled};
  static_assert(std::size(kByIndex) == std::variant_size_v<decltype(data_)>);
  const auto* sequence = std::get_if<std::shared_ptr<const Sequence>>(&data_);
  if (sequence != nullptr && (*sequence)->tuple) return Kind::kTuple;
  return kByIndex[data_.index()];
}

namespace {

[[noreturn]] void wrong_kind(Value::Kind found, std::string_view wanted) {
  throw Error(ErrorCode::kInvalidArgument, "the value is of kind " + std::string(to_string(found)) +
                                               ", not " + std::string(wanted));
}

template <typename T, typename Variant>
const T& get_or_throw(const Variant& data, const Value& value, Value::Kind wanted) {
  if (const T* content = std::get_if<T>(&data)) return *content;
  wrong_kind(value.kind(), to_string(wanted));
}

}  // namespace

bool Value::as_bool() const { return get_or_throw<bool>(data_, *this, Kind::kBool); }
int64_t Value::as_int() const { return get_or_throw<int64_t>(data_, *this, Kind::kInt); }
double Value::as_float() const { return get_or_throw<double>(data_, *this, Kind::kFloat); }
DType Value::as_dtype() const { return get_or_throw<DType>(data_, *this, Kind::kDType); }
const BigInt& Value::as_big_int() const {
  return get_or_throw<BigInt>(data_, *this, Kind::kBigInt);
}
const std::string& Value::as_string() const {
  return get_or_throw<std::string>(data_, *this, Kind::kString);
}
const Bytes& Value::as_bytes() const {
  return *get_or_throw<std::shared_ptr<const Bytes>>(data_, *this, Kind::kBytes);
}
const Value::List& Value::items() const {
  if (const auto* list = std::get_if<std::shared_ptr<const Sequence>>(&data_)) {
    return (*list)->items;
  }
  wrong_kind(kind(), "list or tuple");
}
const Value::Dict& Value::as_dict() const {
  return get_or_throw<std::shared_ptr<const Mapping>>(data_, *this, Kind::kDict)->items;
}
bool Value::is_ordered_dict() const {
  const auto* dict = std::get_if<std::shared_ptr<const Mapping>>(&data_);
  return dict != nullptr && (*dict)->ordered;
}
const Value& Value::attributes() const {
  return get_or_throw<std::shared_ptr<const Mapping>>(data_, *this, Kind::kDict)->attributes;
}
const TensorView& Value::as_tensor() const {
  return get_or_throw<std::shared_ptr<const TensorBox>>(data_, *this, Kind::kTensor)->tensor;
}
const Autograd& Value::autograd() const {
  return get_or_throw<std::shared_ptr<const TensorBox>>(data_, *this, Kind::kTensor)->autograd;
}
const Opaque& Value::as_opaque() const {
  return get_or_throw<std::shared_ptr<const OpaqueBox>>(data_, *this, Kind::kOpaque)->opaque;
}
const Pickled& Value::as_pickled() const {
  return *get_or_throw<std::shared_ptr<const Pickled>>(data_, *this, Kind::kPickled);
}

namespace {

template <typename Number>
[[noreturn]] void out_of_range(Number value, const std::string& lowest,
                               const std::string& highest) {
  throw Error(ErrorCode::kInvalidArgument, "the value " + std::to_string(value) +
                                               " is outside the integer type's range [" + lowest +
                                               ", " + highest + "]");
}

}  // namespace

int64_t Value::signed_in(int64_t lowest, int64_t highest) const {
  const int64_t value = as_int();
  if (value < lowest || value > highest) {
    out_of_range(value, std::to_string(lowest), std::to_string(highest));
  }
  return value;
}

uint64_t Value::unsigned_up_to(uint64_t highest) const {
  const auto* big = std::get_if<BigInt>(&data_);
  uint64_t value = 0;
  if (big != nullptr && big->bytes.size() == 9 && big->bytes.back() == std::byte{0}) {
    for (size_t i = 0; i < 8; ++i) value |= static_cast<uint64_t>(big->bytes[i]) << (8 * i);
  } else {
    const int64_t small = as_int();
    if (small < 0) out_of_range(small, "0", std::to_string(highest));
    value = static_cast<uint64_t>(small);
  }
  if (value > highest) out_of_range(value, "0", std::to_string(highest));
  return value;
}

const Value* Value::find(std::string_view key) const {
  for (const auto& [name, value] : as_dict()) {
    const auto* text = std::get_if<std::string>(&name.data_);
    if (text != nullptr && *text == key) return &value;
  }
  return nullptr;
}

const void* Value::shared_id() const {
  return std::visit(
      [](const auto& content) -> const void* {
        if constexpr (requires { content.use_count(); }) {
          return content.use_count() > 1 ? content.get() : nullptr;
        } else {
          return nullptr;
        }
      },
      data_);
}

std::string_view to_string(Value::Kind kind) {
  constexpr std::string_view kNames[] = {"null",   "bool",  "int",    "big int", "float",
                                         "string", "bytes", "list",   "tuple",   "dict",
                                         "tensor", "dtype", "opaque", "pickled"};
  return kNames[static_cast<size_t>(kind)];
}

namespace {

bool same_elements(const TensorView& a, const TensorView& b) {
  if (a.dtype != b.dtype || a.shape != b.shape) return false;
  constexpr uint64_t kStep = 1 << 16;
  const uint64_t size = a.bytes();
  const StridedView left = a.strided_view();
  const StridedView right = b.strided_view();
  Bytes x(std::min(size, kStep));
  Bytes y(x.size());
  for (uint64_t begin = 0; begin < size; begin += kStep) {
    const auto count = static_cast<size_t>(std::min(kStep, size - begin));
    pack_range(left, begin, MutableByteView(x).first(count));
    pack_range(right, begin, MutableByteView(y).first(count));
    if (!std::equal(x.begin(), x.begin() + static_cast<ptrdiff_t>(count), y.begin())) return false;
  }
  return true;
}

}  // namespace

bool operator==(const Value& a, const Value& b) {
  using Kind = Value::Kind;
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Kind::kNull:
      return true;
    case Kind::kBool:
      return a.as_bool() == b.as_bool();
    case Kind::kInt:
      return a.as_int() == b.as_int();
    case Kind::kBigInt:
      return a.as_big_int() == b.as_big_int();
    case Kind::kFloat:
      return std::bit_cast<uint64_t>(a.as_float()) == std::bit_cast<uint64_t>(b.as_float());
    case Kind::kString:
      return a.as_string() == b.as_string();
    case Kind::kBytes:
      return a.as_bytes() == b.as_bytes();
    case Kind::kList:
    case Kind::kTuple:
      return &a.items() == &b.items() || a.items() == b.items();
    case Kind::kDict:
      return &a.as_dict() == &b.as_dict() ||
             (a.is_ordered_dict() == b.is_ordered_dict() && a.attributes() == b.attributes() &&
              a.as_dict() == b.as_dict());
    case Kind::kTensor:
      return &a.as_tensor() == &b.as_tensor() ||
             (a.autograd() == b.autograd() && same_elements(a.as_tensor(), b.as_tensor()));
    case Kind::kDType:
      return a.as_dtype() == b.as_dtype();
    case Kind::kOpaque:
      return &a.as_opaque() == &b.as_opaque() || a.as_opaque() == b.as_opaque();
    case Kind::kPickled:
      return a.as_pickled() == b.as_pickled();
  }
  return false;
}

}  // namespace tilestone
