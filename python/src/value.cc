// Leaves: converts Python objects to Values, and back. An object that a Value can't represent is
// pickled by Python itself. A load returns it as an Opaque, and creates the object only if the
// caller has allowed its class (tilestone._objects.opaque).
#include <unordered_map>

#include "python/src/bindings.h"
#include "tilestone/format/archive/torch_archive.h"

namespace tilestone::python {
namespace {

constexpr int kMaxDepth = 200;  // a deeper (or cyclic) leaf is pickled

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
  if (text == nullptr) {  // lone surrogates, which only a pickle can hold
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
  if (PyFloat_CheckExact(o)) return Value(PyFloat_AsDouble(o));
  if (PyUnicode_CheckExact(o)) return from_text(object);
  if (PyBytes_CheckExact(o)) return Value(to_bytes_owned(nb::borrow<nb::bytes>(object)));
  return std::nullopt;
}

// Makes Values from Python's objects; nullopt for an object that only a pickle can hold. A
// container that occurs in several places becomes one shared value.
class ValueMaker {
 public:
  explicit ValueMaker(const Bridge& bridge) : bridge_(bridge) {}

  std::optional<Value> make(nb::handle object, int depth) {
    if (depth > kMaxDepth) return std::nullopt;
    PyObject* o = object.ptr();
    const bool sequence = PyList_CheckExact(o) || PyTuple_CheckExact(o);
    if (!sequence && !PyDict_CheckExact(o)) return make_other(object, depth);
    if (Py_REFCNT(o) > 1) {
      const auto known = known_.find(o);
      if (known != known_.end()) return known->second;
    }
    auto value = sequence ? from_sequence(object, depth + 1) : from_mapping(object, depth + 1);
    if (value && Py_REFCNT(o) > 1) known_.emplace(o, *value);
    return value;
  }

 private:
  std::optional<Value> make_other(nb::handle object, int depth) {
    if (auto value = scalar(object)) return value;
    if (PyUnicode_CheckExact(object.ptr())) return std::nullopt;
    nb::object described = bridge_.describe_in_value(object);
    if (nb::isinstance<TensorView>(described)) return Value(nb::cast<TensorView>(described));
    if (PyTuple_CheckExact(described.ptr())) return from_variable(described);
    if (PyUnicode_CheckExact(described.ptr())) {
      return Value(dtype_named(nb::cast<std::string>(described)));
    }
    if (described.is_none()) return std::nullopt;
    check_opaque(object);  // describe_in_value returned an Opaque itself
    return from_opaque(object, depth + 1);
  }

  // (view, whether it is a parameter, whether it requires grad)
  static Value from_variable(nb::handle described) {
    const Autograd autograd{nb::cast<bool>(described[1]), nb::cast<bool>(described[2])};
    return Value(nb::cast<TensorView>(described[0]), autograd);
  }

  std::optional<Value::List> items(nb::handle sequence, int depth) {
    nb::object fast = nb::steal(PySequence_Fast(sequence.ptr(), "a list or tuple"));
    if (!fast.is_valid()) throw nb::python_error();
    const Py_ssize_t count = fast_size(fast.ptr());
    Value::List out;
    out.reserve(static_cast<size_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
      auto item = make(fast_item(fast.ptr(), i), depth);
      if (!item) return std::nullopt;
      out.push_back(std::move(*item));
    }
    return out;
  }
  std::optional<Value> from_sequence(nb::handle object, int depth) {
    auto list = items(object, depth);
    if (!list) return std::nullopt;
    return PyTuple_Check(object.ptr()) ? Value::tuple(std::move(*list))
                                       : Value::list(std::move(*list));
  }

  std::optional<Value::Dict> entries(nb::handle dict, int depth) {
    Value::Dict out;
    for (auto [key, item] : nb::borrow<nb::dict>(dict)) {
      auto key_value = value_of_key(key, Numbers::kOfPython, depth);
      auto value = key_value ? make(item, depth) : std::nullopt;
      if (!value) return std::nullopt;
      out.emplace_back(std::move(*key_value), std::move(*value));
    }
    return out;
  }
  std::optional<Value> from_mapping(nb::handle object, int depth) {
    auto dict = entries(object, depth);
    if (!dict) return std::nullopt;
    return Value::dict(std::move(*dict));
  }

  static void check_opaque(nb::handle object) {
    const auto is = [&](const char* name, bool (*check)(nb::handle)) {
      if (check(object.attr(name))) return;
      throw Error(ErrorCode::kInvalidArgument,
                  std::string("the attribute \"") + name + "\" of an Opaque has the wrong type: " +
                      nb::cast<std::string>(nb::repr(object.attr(name))));
    };
    const auto is_text = [](nb::handle h) { return PyUnicode_Check(h.ptr()) != 0; };
    const auto is_sequence = [](nb::handle h) {
      return PyTuple_Check(h.ptr()) || PyList_Check(h.ptr());
    };
    const auto is_dict = [](nb::handle h) { return PyDict_Check(h.ptr()) != 0; };
    for (const char* name : {"kind", "module", "name"}) is(name, is_text);
    for (const char* name : {"args", "appended"}) is(name, is_sequence);
    for (const char* name : {"keywords", "entries"}) is(name, is_dict);
    is("has_state", [](nb::handle h) { return PyBool_Check(h.ptr()) != 0; });
  }

  // An Opaque, which is written as the original object.
  std::optional<Value> from_opaque(nb::handle object, int depth) {
    Opaque opaque;
    const auto kind = nb::cast<std::string>(object.attr("kind"));
    if (kind != "global" && kind != "call" && kind != "new") {
      throw Error(
          ErrorCode::kInvalidArgument,
          "the kind of an Opaque must be \"global\", \"call\" or \"new\", not \"" + kind + "\"");
    }
    opaque.kind = kind == "global" ? Opaque::Kind::kGlobal
                  : kind == "call" ? Opaque::Kind::kCall
                                   : Opaque::Kind::kNew;
    opaque.module = nb::cast<std::string>(object.attr("module"));
    opaque.name = nb::cast<std::string>(object.attr("name"));
    opaque.has_state = nb::cast<bool>(object.attr("has_state"));
    auto args = items(object.attr("args"), depth);
    auto keywords = entries(object.attr("keywords"), depth);
    auto state = make(object.attr("state"), depth);
    auto appended = items(object.attr("appended"), depth);
    auto set = entries(object.attr("entries"), depth);
    if (!args || !keywords || !state || !appended || !set) return std::nullopt;
    opaque.args = std::move(*args);
    opaque.keywords = std::move(*keywords);
    opaque.state = std::move(*state);
    opaque.appended = std::move(*appended);
    opaque.entries = std::move(*set);
    return Value(std::move(opaque));
  }

  const Bridge& bridge_;
  std::unordered_map<PyObject*, Value> known_;
};

// The element of the original list or tuple at an index; None if the original has no such element.
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
  if (found == nullptr) PyErr_Clear();
  return found == nullptr ? nb::object(nb::none()) : nb::borrow(found);
}

nb::object make_int(const BigInt& number) {
  const nb::bytes bytes = python_bytes(number.bytes);
  nb::object int_type = nb::borrow(reinterpret_cast<PyObject*>(&PyLong_Type));
  return int_type.attr("from_bytes")(bytes, "little", nb::arg("signed") = true);
}

nb::object make_text(const std::string& text) {
  return nb::steal(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogatepass"));
}

// Makes Python's objects from Values. A shared value becomes one object. The recursion is safe
// because the reader limits how deep values are nested.
class ObjectMaker {
 public:
  explicit ObjectMaker(const Bridge& bridge) : bridge_(bridge) {}

  nb::object make(const Value& value, nb::handle original) {
    const void* shared = is_made(value) ? value.shared_id() : nullptr;
    if (shared == nullptr) return make_whole(value, original);
    const auto known = known_.find(shared);
    if (known != known_.end()) return known->second;
    nb::object made = make_whole(value, original);
    known_.emplace(shared, made);
    return made;
  }

 private:
  static bool is_made(const Value& value) {
    switch (value.kind()) {
      case Value::Kind::kList:
      case Value::Kind::kTuple:
      case Value::Kind::kDict:
      case Value::Kind::kOpaque:
        return true;
      default:
        return false;
    }
  }

  nb::object make_whole(const Value& value, nb::handle original) {
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
        return python_bytes(value.as_bytes());
      case Value::Kind::kList:
        return make_list(value.items(), original);
      case Value::Kind::kTuple:
        return nb::tuple(make_list(value.items(), original));
      case Value::Kind::kDict:
        return make_mapping(value, original);
      case Value::Kind::kTensor:
        return make_tensor(value, original);
      case Value::Kind::kDType:
        return bridge_.make_dtype(to_string(value.as_dtype()));
      case Value::Kind::kOpaque:
        return make_opaque(value.as_opaque());
      case Value::Kind::kPickled:
        return python_bytes(value.as_pickled().bytes);
    }
    throw Error(ErrorCode::kInternal, "a value has an unknown kind");
  }

  nb::object make_tensor(const Value& value, nb::handle original) {
    nb::object made = from_tensor(value.as_tensor(), original, bridge_);
    const Autograd& autograd = value.autograd();
    if (autograd == Autograd{}) return made;
    return bridge_.make_variable(made, autograd.parameter, autograd.requires_grad);
  }

  nb::list make_list(const Value::List& items, nb::handle original) {
    nb::list out;
    Py_ssize_t index = 0;
    for (const Value& item : items) out.append(make(item, element(original, index++)));
    return out;
  }

  nb::object make_mapping(const Value& value, nb::handle original) {
    if (!value.is_ordered_dict()) return make_dict(value.as_dict(), original);
    return bridge_.make_ordered_dict(make_dict(value.as_dict(), original),
                                     make(value.attributes(), nb::none()));
  }
  nb::dict make_dict(const Value::Dict& items, nb::handle original) {
    nb::dict out;
    for (const auto& [key, item] : items) {
      nb::object python_key = make(key, nb::none());
      nb::object made = make(item, entry(original, python_key));
      if (PyDict_SetItem(out.ptr(), python_key.ptr(), made.ptr()) == 0) continue;
      if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) throw nb::python_error();
      PyErr_Clear();
      throw Error(ErrorCode::kUnsafe,
                  "a dict of the object has a key that can't be hashed: " + to_string(key, 200));
    }
    return out;
  }

  nb::object make_opaque(const Opaque& opaque) {
    static constexpr const char* kKinds[] = {"global", "call", "new"};
    return bridge_.make_opaque(
        kKinds[static_cast<int>(opaque.kind)], opaque.module, opaque.name,
        nb::tuple(make_list(opaque.args, nb::none())), make(opaque.state, nb::none()),
        opaque.has_state, make_list(opaque.appended, nb::none()),
        make_dict(opaque.entries, nb::none()), make_dict(opaque.keywords, nb::none()));
  }

  const Bridge& bridge_;
  std::unordered_map<const void*, nb::object> known_;
};

}  // namespace

std::optional<Value> value_of_key(nb::handle key, Numbers numbers, int depth) {
  PyObject* o = key.ptr();
  if (PyTuple_CheckExact(o)) {
    if (depth > kMaxDepth) return std::nullopt;
    Value::List items;
    for (nb::handle item : nb::borrow<nb::tuple>(key)) {
      auto value = value_of_key(item, numbers, depth + 1);
      if (!value) return std::nullopt;
      items.push_back(std::move(*value));
    }
    return Value::tuple(std::move(items));
  }
  if (numbers == Numbers::kOfPython || PyBool_Check(o)) return scalar(key);
  if (PyFloat_Check(o)) return Value(PyFloat_AsDouble(o));
  if (PyIndex_Check(o) == 0) return scalar(key);
  const nb::object number = nb::steal(PyNumber_Index(o));
  if (!number.is_valid()) throw nb::python_error();
  auto value = from_int(number);
  return value->kind() == Value::Kind::kInt ? value : std::nullopt;
}

nb::bytes python_bytes(ByteView bytes) { return nb::bytes(bytes.data(), bytes.size()); }

ByteView byte_view(const nb::bytes& bytes) {
  return {static_cast<const std::byte*>(bytes.data()), bytes.size()};
}

SharedBytes shared_bytes(const nb::bytes& bytes) { return {byte_view(bytes), keep_alive(bytes)}; }

Bytes to_bytes_owned(const nb::bytes& bytes) {
  const ByteView view = byte_view(bytes);
  return Bytes(view.begin(), view.end());
}

Value to_value(nb::handle object, const Bridge& bridge, const Path& path) {
  // The contents of a template's leaf don't matter, because the stored value replaces it.
  if (bridge.for_load) return Value();
  try {
    if (auto value = ValueMaker(bridge).make(object, 0)) return *value;
  } catch (Error& error) {
    if (error.key().empty()) error.with_key(dotted(path));
    throw;
  }
  auto [bytes, archive] = nb::cast<std::pair<nb::bytes, bool>>(bridge.pickle(object, dotted(path)));
  return Value(Pickled{shared_bytes(bytes), archive, true});  // Python's side has checked it
}

nb::object from_value(const Value& value, nb::handle original, const Bridge& bridge) {
  return ObjectMaker(bridge).make(value, original);
}

void bind_value(nb::module_& m) {
  m.def(
      "pickled_classes",
      [](const nb::bytes& bytes, bool archive) { return classes_in(byte_view(bytes), archive); },
      nb::arg("pickled"), nb::arg("archive"),
      "The names of the classes whose objects a load of this pickle would return as Opaque.\n\n"
      "Raises InvalidArgumentError if the pickle could not be read back.");
}

}  // namespace tilestone::python
