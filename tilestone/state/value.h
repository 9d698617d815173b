// Value: common data of a state dict, as a closed set of plain kinds. Values are immutable and
// cheap to copy, because containers are shared. A value does not know how it was pickled, except
// for Opaque.
//
// A value is nested at most kMaxValueDepth levels deep, so that code that walks it may recurse.
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

// Of containers and opaque objects inside one another. One with nothing in it has 0.
inline constexpr uint32_t kMaxValueDepth = 1000;

// An integer outside int64: two's complement, little-endian, in the shortest form.
struct BigInt {
  Bytes bytes;
  friend bool operator==(const BigInt&, const BigInt&) = default;
};
std::string to_string(const BigInt& value);  // in decimal

// A complete object pickled by the caller's own Python. It is never interpreted here. `archive`:
// the bytes are a torch.save archive; otherwise they are a bare pickle. `checked`: classes_in() has
// read it, so that it need not be checked again.
struct Pickled {
  SharedBytes bytes;
  bool archive = false;
  bool checked = false;
  friend bool operator==(const Pickled& a, const Pickled& b) {
    return a.bytes == b.bytes && a.archive == b.archive;
  }
};

// What torch's autograd knows about a tensor in an object.
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

  // All constructors and the destructor are defined in value.cc: what std::variant generates for
  // them takes seconds to compile. Those of containers and opaque objects throw
  // Error(kInvalidArgument) if they would be nested deeper than kMaxValueDepth.
  Value() noexcept;  // null
  Value(std::nullptr_t) noexcept;
  Value(bool value) noexcept;
  Value(int value) noexcept;
  Value(int64_t value) noexcept;
  Value(uint64_t value);  // a BigInt if it does not fit an int64
  Value(double value) noexcept;
  Value(const char* text);
  Value(std::string text) noexcept;
  Value(BigInt value) noexcept;
  Value(Bytes bytes);
  Value(TensorView tensor);  // host memory; the value shares the view's owner
  Value(TensorView tensor, Autograd autograd);
  Value(DType dtype) noexcept;
  Value(Pickled pickled);
  Value(Opaque opaque);
  Value(const Value&);
  Value(Value&&) noexcept;
  Value& operator=(const Value&);
  Value& operator=(Value&&) noexcept;
  ~Value();
  static Value list(List items);
  static Value tuple(List items);
  static Value dict(Dict items);
  // A collections.OrderedDict: a dict that remembers its class, and the object's attributes as a
  // dict, or null (a module's state dict has the attribute "_metadata").
  static Value ordered_dict(Dict items, Value attributes = {});

  Kind kind() const;
  bool is_null() const { return kind() == Kind::kNull; }

  // The content. Throws Error(kInvalidArgument), naming both kinds, if the value is of another
  // kind.
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
  // The content by its C++ type: bool, any integer type, double, std::string, BigInt, Bytes, DType,
  // TensorView, Opaque, Pickled, List (of a list or tuple) or Dict. Throws like the functions
  // above, and Error(kInvalidArgument) for a number that the integer type can't hold. Returns
  // scalars as copies and everything else as references into the value.
  template <typename T>
  decltype(auto) as() const;
  // The kind of value that as<T>() expects.
  template <typename T>
  static constexpr Kind kind_for();
  // The entry of a dict under a string key, or null if absent. Compares every entry.
  const Value* find(std::string_view key) const;

  // Identifies the content that this container, opaque object, tensor or bytes may share with other
  // values. Values that share it have equal ids. Null if this value is the only owner, or is a
  // scalar.
  const void* shared_id() const;

  // Equal kinds and contents. Dicts must have the same order. Floats are compared by bits (NaN
  // equals itself), and tensors by dtype, shape, the bytes of the elements, and autograd
  // information.
  friend bool operator==(const Value& a, const Value& b);

 private:
  struct Sequence;
  struct Mapping;
  struct TensorBox;
  struct OpaqueBox;
  template <typename Box>
  static Value container(Box box);
  uint32_t depth() const;
  int64_t signed_in(int64_t lowest, int64_t highest) const;
  uint64_t unsigned_up_to(uint64_t highest) const;
  std::variant<std::monostate, bool, int64_t, double, std::string, BigInt, DType,
               std::shared_ptr<const Bytes>, std::shared_ptr<const Sequence>,
               std::shared_ptr<const Mapping>, std::shared_ptr<const TensorBox>,
               std::shared_ptr<const OpaqueBox>, std::shared_ptr<const Pickled>>
      data_;
};

std::string_view to_string(Value::Kind kind);
// Python's repr where there is one ("{'a': [1, 2.5]}"), "tensor float32 [2, 3]", and an opaque
// object's constructor call. At most `limit` bytes (cut between characters), then "...".
std::string to_string(const Value& value, size_t limit = 4096);

// An object of a class that Value does not cover, as its pickle describes it. The object is not
// created here. Python only creates it for classes that the caller allows by name.
struct Opaque {
  enum class Kind {
    kGlobal,  // the class or function itself
    kCall,    // module.name(*args)
    kNew,     // module.name.__new__(module.name, *args)
  };
  Kind kind = Kind::kGlobal;
  std::string module;
  std::string name;  // with dots for nested classes ("Outer.Inner")
  Value::List args;
  Value::Dict keywords;  // by name; kNew only
  Value state;           // the argument of __setstate__ (or __dict__.update)
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
