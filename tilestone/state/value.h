// Value: common data of a state dict, as a closed set of plain kinds. Values are immutable and
// cheap to copy (containers are shared), and never know how they were pickled, except for Opaque.
//
// Values may be nested to any depth: destruction, comparison and to_string do not recurse.
#pragma once

#include <concepts>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/state/tensor_view.h"

namespace tilestone {

class Value;
struct Opaque;

// An integer outside int64: two's complement, little-endian, shortest form.
struct BigInt {
  Bytes bytes;
  friend bool operator==(const BigInt&, const BigInt&) = default;
};
std::string to_string(const BigInt& value);  // decimal

// A whole object pickled by the caller's own Python, never interpreted here. `archive`: the bytes
// are a torch.save archive; otherwise a bare pickle.
struct Pickled {
  Bytes bytes;
  bool archive = false;
  friend bool operator==(const Pickled&, const Pickled&) = default;
};

// What torch's autograd knows of a tensor that stands in an object.
struct Autograd {
  bool parameter = false;  // a torch.nn.Parameter
  bool requires_grad = false;
  friend bool operator==(const Autograd&, const Autograd&) = default;
};

class Value {
 public:
  using List = std::vector<Value>;
  using Dict = std::vector<std::pair<Value, Value>>;  // in insertion order; keys: scalars, tuples
  enum class Kind {
    kNull,
    kBool,
    kInt,
    kBigInt,
    kFloat,
    kString,
    kBytes,
    kList,
    kTuple,
    kDict,
    kTensor,
    kDType,
    kOpaque,
    kPickled
  };

  Value() = default;  // null
  Value(std::nullptr_t) {}
  Value(bool value) : data_(value) {}
  Value(int value) : data_(int64_t{value}) {}
  Value(int64_t value) : data_(value) {}
  Value(uint64_t value);  // a BigInt where it must
  Value(double value) : data_(value) {}
  Value(const char* text) : data_(std::string(text)) {}
  Value(std::string text) : data_(std::move(text)) {}
  Value(BigInt value) : data_(std::move(value)) {}
  Value(Bytes bytes) : data_(std::make_shared<const Bytes>(std::move(bytes))) {}
  Value(TensorView tensor);  // host memory; the value shares the view's owner
  Value(TensorView tensor, Autograd autograd);
  Value(DType dtype) : data_(dtype) {}
  Value(Pickled pickled) : data_(std::make_shared<const Pickled>(std::move(pickled))) {}
  Value(Opaque opaque);
  static Value list(List items);
  static Value tuple(List items);
  static Value dict(Dict items);
  // A collections.OrderedDict: a dict whose class is remembered, and the attributes that the object
  // had (a module's state dict has "_metadata") as a dict; null: none.
  static Value ordered_dict(Dict items, Value attributes = {});

  Kind kind() const;
  bool is_null() const { return kind() == Kind::kNull; }

  // The content; Error(kInvalidArgument) naming both kinds when the value is of another.
  bool as_bool() const;
  int64_t as_int() const;
  const BigInt& as_big_int() const;
  double as_float() const;
  const std::string& as_string() const;
  const Bytes& as_bytes() const;
  const List& items() const;  // of a list or tuple
  const Dict& as_dict() const;
  bool is_ordered_dict() const;     // false for every other kind
  const Value& attributes() const;  // of a dict
  const TensorView& as_tensor() const;
  const Autograd& autograd() const;  // of a tensor
  DType as_dtype() const;
  const Opaque& as_opaque() const;
  const Pickled& as_pickled() const;
  // The content by its C++ type, with the same errors: bool, any integer type (also
  // Error(kInvalidArgument) for a number that it can't hold), double, std::string, BigInt, Bytes,
  // DType, TensorView, Opaque, Pickled, List (of a list or tuple) or Dict. Scalars come as copies,
  // the others as references into the value.
  template <typename T>
  decltype(auto) as() const;
  // The kind of value that as<T>() expects.
  template <typename T>
  static constexpr Kind kind_for();
  // The entry of a dict under a string key; null when absent. Looks at every entry.
  const Value* find(std::string_view key) const;

  // What this container, opaque object, tensor or bytes is known by where other values may share
  // it: equal for values that share it, null where this value is its only owner or it is a scalar.
  const void* shared_id() const;

  // Equal kinds and contents; dicts in order, floats by bits (NaN equals itself), tensors by
  // dtype, shape, elements' bytes and what autograd knows of them.
  friend bool operator==(const Value& a, const Value& b);

 private:
  struct Sequence;
  struct Mapping;
  struct TensorBox;
  struct OpaqueBox;
  class Graveyard;
  bool is_nested() const;
  int64_t signed_in(int64_t lowest, int64_t highest) const;
  uint64_t unsigned_up_to(uint64_t highest) const;
  std::variant<std::monostate, bool, int64_t, double, std::string, BigInt, DType,
               std::shared_ptr<const Bytes>, std::shared_ptr<const Sequence>,
               std::shared_ptr<const Mapping>, std::shared_ptr<const TensorBox>,
               std::shared_ptr<const Opaque>, std::shared_ptr<const Pickled>>
      data_;
};

std::string_view to_string(Value::Kind kind);
// Python's repr where Python has one ("{'a': [1, 2.5]}"), "tensor float32 [2, 3]", and an opaque
// object's constructor call. At most `limit` bytes (cut between characters), then "...".
std::string to_string(const Value& value, size_t limit = 4096);

// An object of a class that is no Value, as the pickle describes it: never made. Python
// turns it into an object only for classes that the caller allows by name.
struct Opaque {
  enum class Kind {
    kGlobal,  // the class or function itself
    kCall,    // module.name(*args)
    kNew,     // module.name.__new__(module.name, *args)
  };
  Kind kind = Kind::kGlobal;
  std::string module;
  std::string name;  // with dots for what stands inside a class ("Outer.Inner")
  Value::List args;
  Value::Dict keywords;  // by name; of kNew only
  Value state;           // what __setstate__ (or __dict__.update) would get; null: none
  bool has_state = false;
  Value::List appended;  // list items added to the object
  Value::Dict entries;   // dict items set on the object
  friend bool operator==(const Opaque&, const Opaque&) = default;
};

template <typename T>
constexpr Value::Kind Value::kind_for() {
  if constexpr (std::same_as<T, bool>) return Kind::kBool;
  if constexpr (std::integral<T>) return Kind::kInt;
  if constexpr (std::same_as<T, double>) return Kind::kFloat;
  if constexpr (std::same_as<T, std::string>) return Kind::kString;
  if constexpr (std::same_as<T, BigInt>) return Kind::kBigInt;
  if constexpr (std::same_as<T, Bytes>) return Kind::kBytes;
  if constexpr (std::same_as<T, DType>) return Kind::kDType;
  if constexpr (std::same_as<T, TensorView>) return Kind::kTensor;
  if constexpr (std::same_as<T, Opaque>) return Kind::kOpaque;
  if constexpr (std::same_as<T, Pickled>) return Kind::kPickled;
  if constexpr (std::same_as<T, List>) return Kind::kList;
  if constexpr (std::same_as<T, Dict>) return Kind::kDict;
  return Kind::kNull;
}

template <typename T>
decltype(auto) Value::as() const {
  constexpr Kind kWanted = kind_for<T>();
  static_assert(kWanted != Kind::kNull, "no kind of value has content of this type");
  if constexpr (kWanted == Kind::kBool) {
    return as_bool();
  } else if constexpr (kWanted == Kind::kInt && std::signed_integral<T>) {
    return static_cast<T>(signed_in(std::numeric_limits<T>::min(), std::numeric_limits<T>::max()));
  } else if constexpr (kWanted == Kind::kInt) {
    return static_cast<T>(unsigned_up_to(std::numeric_limits<T>::max()));
  } else if constexpr (kWanted == Kind::kFloat) {
    return as_float();
  } else if constexpr (kWanted == Kind::kString) {
    return as_string();
  } else if constexpr (kWanted == Kind::kBigInt) {
    return as_big_int();
  } else if constexpr (kWanted == Kind::kBytes) {
    return as_bytes();
  } else if constexpr (kWanted == Kind::kDType) {
    return as_dtype();
  } else if constexpr (kWanted == Kind::kTensor) {
    return as_tensor();
  } else if constexpr (kWanted == Kind::kOpaque) {
    return as_opaque();
  } else if constexpr (kWanted == Kind::kPickled) {
    return as_pickled();
  } else if constexpr (kWanted == Kind::kList) {
    return items();
  } else {
    return as_dict();
  }
}

}  // namespace tilestone
