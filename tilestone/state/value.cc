#include "tilestone/state/value.h"

#include <algorithm>
#include <bit>

#include "tilestone/base/error.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone {

// A container that is destroyed hands its nested containers over to the outermost container that is
// being destroyed on this thread. So a chain of values of any depth is destroyed without recursion.
class Value::Graveyard {
 public:
  static void bury(List& items) {
    for (Value& item : items) bury(item);
  }
  static void bury(Dict& items) {
    for (auto& [key, value] : items) {
      bury(key);
      bury(value);
    }
  }
  static void bury(Value& value) {
    if (value.is_nested()) open_->push_back(std::move(value));
  }

  // Becomes this thread's outermost Graveyard if there is none. The outermost one destroys the
  // collected values one by one when it is destroyed itself.
  Graveyard() : outermost_(open_ == nullptr) {
    if (outermost_) open_ = &dead_;
  }
  ~Graveyard() {
    if (!outermost_) return;
    while (!dead_.empty()) {
      const Value last = std::move(dead_.back());
      dead_.pop_back();
    }
    open_ = nullptr;
  }
  Graveyard(const Graveyard&) = delete;
  Graveyard& operator=(const Graveyard&) = delete;

 private:
  static thread_local List* open_;
  bool outermost_;
  List dead_;
};

thread_local Value::List* Value::Graveyard::open_ = nullptr;

struct Value::Sequence {
  Sequence(List list, bool is_tuple) : items(std::move(list)), tuple(is_tuple) {}
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;
  ~Sequence() {
    const Graveyard grave;
    Graveyard::bury(items);
  }
  List items;
  bool tuple;
};

struct Value::Mapping {
  Mapping(Dict dict, bool is_ordered, Value others)
      : items(std::move(dict)), ordered(is_ordered), attributes(std::move(others)) {}
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    const Graveyard grave;
    Graveyard::bury(items);
    Graveyard::bury(attributes);
  }
  Dict items;
  bool ordered;
  Value attributes;
};

struct Value::TensorBox {
  TensorView tensor;
  Autograd autograd;
};

struct Value::OpaqueBox {
  explicit OpaqueBox(Opaque object) : opaque(std::move(object)) {}
  OpaqueBox(const OpaqueBox&) = delete;
  OpaqueBox& operator=(const OpaqueBox&) = delete;
  ~OpaqueBox() {
    const Graveyard grave;
    Graveyard::bury(opaque.args);
    Graveyard::bury(opaque.keywords);
    Graveyard::bury(opaque.state);
    Graveyard::bury(opaque.appended);
    Graveyard::bury(opaque.entries);
  }
  Opaque opaque;
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

Value::Value(Opaque opaque) {
  auto box = std::make_shared<OpaqueBox>(std::move(opaque));
  const Opaque* inside = &box->opaque;
  data_ = std::shared_ptr<const Opaque>(std::move(box), inside);
}

Value Value::list(List items) {
  Value value;
  value.data_ =
      std::shared_ptr<const Sequence>(std::make_shared<Sequence>(std::move(items), false));
  return value;
}

Value Value::tuple(List items) {
  Value value;
  value.data_ = std::shared_ptr<const Sequence>(std::make_shared<Sequence>(std::move(items), true));
  return value;
}

Value Value::dict(Dict items) {
  Value value;
  value.data_ =
      std::shared_ptr<const Mapping>(std::make_shared<Mapping>(std::move(items), false, Value()));
  return value;
}

Value Value::ordered_dict(Dict items, Value attributes) {
  Value value;
  value.data_ = std::shared_ptr<const Mapping>(
      std::make_shared<Mapping>(std::move(items), true, std::move(attributes)));
  return value;
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

bool Value::is_nested() const {
  return std::holds_alternative<std::shared_ptr<const Sequence>>(data_) ||
         std::holds_alternative<std::shared_ptr<const Mapping>>(data_) ||
         std::holds_alternative<std::shared_ptr<const Opaque>>(data_);
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
  return *get_or_throw<std::shared_ptr<const Opaque>>(data_, *this, Kind::kOpaque);
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

using Pairs = std::vector<std::pair<const Value*, const Value*>>;

bool push_pairs(Pairs& todo, const Value::List& a, const Value::List& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) todo.emplace_back(&a[i], &b[i]);
  return true;
}

bool push_pairs(Pairs& todo, const Value::Dict& a, const Value::Dict& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    todo.emplace_back(&a[i].first, &b[i].first);
    todo.emplace_back(&a[i].second, &b[i].second);
  }
  return true;
}

bool push_pairs(Pairs& todo, const Opaque& a, const Opaque& b) {
  if (a.kind != b.kind || a.module != b.module || a.name != b.name || a.has_state != b.has_state) {
    return false;
  }
  todo.emplace_back(&a.state, &b.state);
  return push_pairs(todo, a.args, b.args) && push_pairs(todo, a.keywords, b.keywords) &&
         push_pairs(todo, a.appended, b.appended) && push_pairs(todo, a.entries, b.entries);
}

// Compares two values except for their children, which it adds to `todo`.
bool same_top(const Value& a, const Value& b, Pairs& todo) {
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
      return &a.items() == &b.items() || push_pairs(todo, a.items(), b.items());
    case Kind::kDict:
      if (&a.as_dict() == &b.as_dict()) return true;
      if (a.is_ordered_dict() != b.is_ordered_dict()) return false;
      todo.emplace_back(&a.attributes(), &b.attributes());
      return push_pairs(todo, a.as_dict(), b.as_dict());
    case Kind::kTensor:
      return &a.as_tensor() == &b.as_tensor() ||
             (a.autograd() == b.autograd() && same_elements(a.as_tensor(), b.as_tensor()));
    case Kind::kDType:
      return a.as_dtype() == b.as_dtype();
    case Kind::kOpaque:
      return &a.as_opaque() == &b.as_opaque() || push_pairs(todo, a.as_opaque(), b.as_opaque());
    case Kind::kPickled:
      return a.as_pickled() == b.as_pickled();
  }
  return false;
}

}  // namespace

bool operator==(const Value& a, const Value& b) {
  Pairs todo = {{&a, &b}};
  while (!todo.empty()) {
    const auto [left, right] = todo.back();
    todo.pop_back();
    if (!same_top(*left, *right, todo)) return false;
  }
  return true;
}

}  // namespace tilestone
