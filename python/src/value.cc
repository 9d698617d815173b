// Leaves: Python objects as Values and back. An object that is no Value is pickled by Python
// itself; what comes back of it is told as Opaque, and made only where the caller allowed its
// class (tilestone._opaque).
#include "python/src/bindings.h"

namespace tilestone::python {
namespace {

constexpr int kDepthLimit = 200;  // a deeper (or cyclic) leaf is pickled

BigInt big_int(nb::handle number) {
  nb::object bits = number.attr("bit_length")();
  const auto size = static_cast<Py_ssize_t>(nb::cast<uint64_t>(bits) / 8 + 1);
  nb::object to_bytes = number.attr("to_bytes");
  nb::bytes bytes = nb::cast<nb::bytes>(to_bytes(size, "little", nb::arg("signed") = true));
  return BigInt{to_bytes_owned(bytes)};
}

std::optional<Value> from_int(nb::handle object) {
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(object.ptr(), &overflow);
  if (overflow == 0) return Value(static_cast<int64_t>(number));
  return Value(big_int(object));
}

std::optional<Value> from_text(nb::handle object) {
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(object.ptr(), &size);
  if (text == nullptr) {  // lone surrogates: only a pickle can hold them
    PyErr_Clear();
    return std::nullopt;
  }
  return Value(std::string(text, static_cast<size_t>(size)));
}

std::optional<Value> scalar(nb::handle object) {
  PyObject* o = object.ptr();
  if (o == Py_None) return Value();
  if (PyBool_Check(o)) return Value(o == Py_True);
  if (PyLong_CheckExact(o)) return from_int(object);
  if (PyFloat_CheckExact(o)) return Value(PyFloat_AS_DOUBLE(o));
  if (PyUnicode_CheckExact(o)) return from_text(object);
  if (PyBytes_CheckExact(o)) return Value(to_bytes_owned(nb::borrow<nb::bytes>(object)));
  return std::nullopt;
}

std::optional<Value> try_value(nb::handle object, const Bridge& bridge, int depth);

std::optional<Value> from_sequence(nb::handle object, const Bridge& bridge, int depth) {
  nb::object items = nb::steal(PySequence_Fast(object.ptr(), "a list or tuple"));
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(items.ptr());
  Value::List out;
  out.reserve(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    auto item = try_value(PySequence_Fast_GET_ITEM(items.ptr(), i), bridge, depth);
    if (!item) return std::nullopt;
    out.push_back(std::move(*item));
  }
  return PyTuple_Check(object.ptr()) ? Value::tuple(std::move(out)) : Value::list(std::move(out));
}

std::optional<Value> from_mapping(nb::handle object, const Bridge& bridge, int depth) {
  Value::Dict out;
  for (auto [key, item] : nb::borrow<nb::dict>(object)) {
    auto key_value = scalar(key);
    auto value = key_value ? try_value(item, bridge, depth) : std::nullopt;
    if (!value) return std::nullopt;
    out.emplace_back(std::move(*key_value), std::move(*value));
  }
  return Value::dict(std::move(out));
}

std::optional<Value> from_described(nb::handle object, const Bridge& bridge) {
  nb::object described = bridge.call("describe_in_value", object);
  if (nb::isinstance<TensorView>(described)) return Value(nb::cast<TensorView>(described));
  if (nb::isinstance<nb::str>(described)) {
    return Value(dtype_named(nb::cast<std::string>(described)));
  }
  return std::nullopt;
}

std::optional<Value> try_value(nb::handle object, const Bridge& bridge, int depth) {
  if (depth > kDepthLimit) return std::nullopt;
  PyObject* o = object.ptr();
  if (PyList_CheckExact(o) || PyTuple_CheckExact(o)) {
    return from_sequence(object, bridge, depth + 1);
  }
  if (PyDict_CheckExact(o)) return from_mapping(object, bridge, depth + 1);
  if (auto value = scalar(object)) return value;
  if (PyUnicode_CheckExact(o)) return std::nullopt;
  return from_described(object, bridge);
}

// Values come from files: Python's own limit of depth holds for them too.
struct RecursionGuard {
  RecursionGuard() {
    if (Py_EnterRecursiveCall(" while an object of a checkpoint is made") != 0) {
      throw nb::python_error();
    }
  }
  ~RecursionGuard() { Py_LeaveRecursiveCall(); }
};

// What Python has at a list's or tuple's place, where the original still has the same form.
nb::object element(nb::handle original, Py_ssize_t index) {
  if (!original.is_valid() || !(PyList_Check(original.ptr()) || PyTuple_Check(original.ptr())) ||
      index >= PySequence_Size(original.ptr())) {
    return nb::none();
  }
  return nb::steal(PySequence_GetItem(original.ptr(), index));
}

nb::object entry(nb::handle original, nb::handle key) {
  if (!original.is_valid() || !PyDict_Check(original.ptr())) return nb::none();
  PyObject* found = PyDict_GetItemWithError(original.ptr(), key.ptr());
  return found == nullptr ? nb::object(nb::none()) : nb::borrow(found);
}

nb::list make_list(const Value::List& items, nb::handle original, const Bridge& bridge) {
  nb::list out;
  Py_ssize_t index = 0;
  for (const Value& item : items) out.append(from_value(item, element(original, index++), bridge));
  return out;
}

nb::dict make_dict(const Value::Dict& items, nb::handle original, const Bridge& bridge) {
  nb::dict out;
  for (const auto& [key, item] : items) {
    nb::object python_key = from_value(key, nb::none(), bridge);
    out[python_key] = from_value(item, entry(original, python_key), bridge);
  }
  return out;
}

nb::object make_opaque(const Opaque& opaque, const Bridge& bridge) {
  static constexpr const char* kKinds[] = {"global", "call", "new"};
  nb::object state = opaque.has_state ? from_value(opaque.state, nb::none(), bridge) : nb::none();
  return bridge.call("make_opaque", kKinds[static_cast<int>(opaque.kind)], opaque.module,
                     opaque.name, nb::tuple(make_list(opaque.args, nb::none(), bridge)), state,
                     opaque.has_state, make_list(opaque.appended, nb::none(), bridge),
                     make_dict(opaque.entries, nb::none(), bridge));
}

nb::object make_int(const BigInt& number) {
  nb::bytes bytes(number.bytes.data(), number.bytes.size());
  nb::object int_type = nb::borrow(reinterpret_cast<PyObject*>(&PyLong_Type));
  return int_type.attr("from_bytes")(bytes, "little", nb::arg("signed") = true);
}

nb::object make_text(const std::string& text) {
  return nb::steal(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogatepass"));
}

}  // namespace

Bytes to_bytes_owned(const nb::bytes& bytes) {
  const auto* data = static_cast<const std::byte*>(static_cast<const void*>(bytes.c_str()));
  return Bytes(data, data + bytes.size());
}

Value to_value(nb::handle object, const Bridge& bridge) {
  // The contents of a template's leaf don't matter: what is stored takes its place.
  if (bridge.for_load()) return Value();
  if (auto value = try_value(object, bridge, 0)) return *value;
  auto [bytes, archive] = nb::cast<std::pair<nb::bytes, bool>>(bridge.call("pickle", object));
  return Value(Pickled{to_bytes_owned(bytes), archive});
}

nb::object from_value(const Value& value, nb::handle original, const Bridge& bridge) {
  RecursionGuard guard;
  switch (value.kind()) {
    case Value::Kind::kNull:
      return nb::none();
    case Value::Kind::kBool:
      return nb::bool_(value.as_bool());
    case Value::Kind::kInt:
      return nb::int_(value.as_int());
    case Value::Kind::kBigInt:
      return make_int(value.as_big_int());
    case Value::Kind::kFloat:
      return nb::float_(value.as_float());
    case Value::Kind::kString:
      return make_text(value.as_string());
    case Value::Kind::kBytes:
      return nb::bytes(value.as_bytes().data(), value.as_bytes().size());
    case Value::Kind::kList:
      return make_list(value.items(), original, bridge);
    case Value::Kind::kTuple:
      return nb::tuple(make_list(value.items(), original, bridge));
    case Value::Kind::kDict:
      return make_dict(value.as_dict(), original, bridge);
    case Value::Kind::kTensor:
      return from_tensor(value.as_tensor(), original, bridge);
    case Value::Kind::kDType:
      return bridge.call("make_dtype", to_string(value.as_dtype()));
    case Value::Kind::kOpaque:
      return make_opaque(value.as_opaque(), bridge);
    case Value::Kind::kPickled:
      return nb::bytes(value.as_pickled().bytes.data(), value.as_pickled().bytes.size());
  }
  throw Error(ErrorCode::kInternal, "a value of no known kind");
}

void bind_value(nb::module_& m) {
  m.def(
      "value_text",
      [](nb::handle object, nb::handle bridge, size_t limit) {
        return to_string(to_value(object, Bridge(bridge)), limit);
      },
      nb::arg("object"), nb::arg("bridge"), nb::arg("limit") = 4096,
      nb::sig("def value_text(object: object, bridge: object, limit: int = 4096) -> str"),
      "How the command line shows an object: Python's repr where Python has one.");
}

}  // namespace tilestone::python
