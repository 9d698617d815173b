// State dicts: Python's containers, tensors and entities as nodes and back.
#include "python/src/bindings.h"

namespace tilestone::python {
namespace {

constexpr size_t kDepthLimit = 200;

// As torch flattens: text and ints as they are, any other key by its str().
PathElement path_element(nb::handle key) {
  if (PyLong_CheckExact(key.ptr())) {
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(key.ptr(), &overflow);
    if (overflow == 0) return static_cast<int64_t>(number);
  }
  return nb::cast<std::string>(nb::str(key));
}

bool is_mapping(nb::handle object) {
  if (PyDict_Check(object.ptr())) return true;
  if (!PyMapping_Check(object.ptr()) || PySequence_Check(object.ptr())) return false;
  nb::object mapping = nb::module_::import_("collections.abc").attr("Mapping");
  return PyObject_IsInstance(object.ptr(), mapping.ptr()) == 1;
}

// Objects that are surely no tensor and hold none.
bool is_plain(nb::handle object) {
  PyObject* o = object.ptr();
  return o == Py_None || PyLong_Check(o) || PyFloat_Check(o) || PyUnicode_Check(o) ||
         PyBytes_Check(o) || PyTuple_CheckExact(o);
}

// As torch flattens: a list is taken apart when a dict or a tensor is in it, or in a list in it.
bool is_descended(nb::handle list, const Bridge& bridge, size_t depth) {
  if (depth > kDepthLimit) return false;
  for (nb::handle item : nb::borrow<nb::list>(list)) {
    if (is_plain(item)) continue;
    if (PyList_CheckExact(item.ptr())) {
      if (is_descended(item, bridge, depth + 1)) return true;
    } else if (is_mapping(item) || nb::cast<bool>(bridge.call("is_entity", item))) {
      return true;
    }
  }
  return false;
}

StateDict to_dict(nb::handle mapping, const Bridge& bridge, const Path& path) {
  if (path.size() > kDepthLimit) {
    throw Error(ErrorCode::kInvalidArgument,
                "the state dict is nested deeper than " + std::to_string(kDepthLimit) + " levels")
        .with_key(dotted(path));
  }
  StateDict out;
  nb::object items = mapping.attr("items")();
  Path below = path;
  below.emplace_back();
  for (nb::handle pair : items) {
    nb::handle key = pair[0];
    below.back() = path_element(key);
    if (out.find(below.back()) != nullptr) {
      throw Error(ErrorCode::kInvalidArgument,
                  "two keys of one dict are the same when they are written as text")
          .with_key(dotted(below));
    }
    out.at(below.back()) = to_node(pair[1], bridge, below);
  }
  return out;
}

StateList to_list(nb::handle list, const Bridge& bridge, const Path& path) {
  StateList out;
  Path below = path;
  below.emplace_back();
  int64_t index = 0;
  for (nb::handle item : nb::borrow<nb::list>(list)) {
    below.back() = index++;
    out.push_back(to_node(item, bridge, below));
  }
  return out;
}

// An entity that the bridge made, or nothing.
std::optional<StateNode> from_described(nb::handle described) {
  if (described.is_none()) return std::nullopt;
  if (nb::isinstance<TensorView>(described)) return nb::cast<TensorView>(described);
  if (nb::isinstance<ShardedTensor>(described)) return nb::cast<ShardedTensor>(described);
  if (nb::isinstance<ShardedObject>(described)) return nb::cast<ShardedObject>(described);
  if (nb::isinstance<ShardedTensorFactory>(described)) {
    return nb::cast<ShardedTensorFactory>(described);
  }
  if (nb::isinstance<LocalNonpersistent>(described)) return nb::cast<LocalNonpersistent>(described);
  return std::nullopt;
}

// The keys of the original by what they became; nothing where the original is no mapping now.
nb::object original_key(const PathElement& element, nb::handle original) {
  if (const auto* number = std::get_if<int64_t>(&element)) return nb::int_(*number);
  const std::string& text = std::get<std::string>(element);
  nb::str key(text.data(), text.size());
  if (!original.is_valid() || !is_mapping(original)) return key;
  if (PySequence_Contains(original.ptr(), key.ptr()) == 1) return key;
  for (nb::handle candidate : original) {
    if (!nb::isinstance<nb::str>(candidate) && nb::str(candidate).equal(key)) {
      return nb::borrow(candidate);
    }
  }
  return key;
}

nb::object item_of(nb::handle original, nb::handle key) {
  if (!original.is_valid() || original.is_none()) return nb::none();
  PyObject* item = PyObject_GetItem(original.ptr(), key.ptr());
  if (item == nullptr) PyErr_Clear();
  return item == nullptr ? nb::object(nb::none()) : nb::steal(item);
}

nb::object from_dict(const StateDict& dict, nb::handle original, const Bridge& bridge) {
  nb::object known =
      original.is_valid() && is_mapping(original) ? nb::borrow(original) : nb::object(nb::none());
  nb::object out = bridge.call("new_mapping", known);
  for (const auto& [element, node] : dict.entries()) {
    nb::object key = original_key(element, known);
    out[key] = from_node(node, item_of(known, key), bridge);
  }
  return out;
}

nb::object from_list(const StateList& list, nb::handle original, const Bridge& bridge) {
  nb::list out;
  int64_t index = 0;
  const bool known = original.is_valid() && PyList_Check(original.ptr());
  for (const StateNode& node : list) {
    nb::object place = known ? item_of(original, nb::int_(index)) : nb::object(nb::none());
    out.append(from_node(node, place, bridge));
    ++index;
  }
  return out;
}

}  // namespace

StateNode to_node(nb::handle object, const Bridge& bridge, const Path& path) {
  if (PyDict_Check(object.ptr())) return to_dict(object, bridge, path);
  if (PyList_CheckExact(object.ptr())) {
    if (path.size() <= kDepthLimit && is_descended(object, bridge, path.size())) {
      return to_list(object, bridge, path);
    }
    return to_value(object, bridge);
  }
  if (is_plain(object)) return to_value(object, bridge);
  if (auto node = from_described(bridge.call("describe", object, dotted(path)))) return *node;
  if (is_mapping(object)) return to_dict(object, bridge, path);
  return to_value(object, bridge);
}

StateDict to_state(nb::handle mapping, const Bridge& bridge) {
  if (!is_mapping(mapping)) {
    throw Error(ErrorCode::kInvalidArgument,
                "a state is a dict, not " +
                    nb::cast<std::string>(nb::str(mapping.type().attr("__name__"))));
  }
  return to_dict(mapping, bridge, {});
}

nb::object from_node(const StateNode& node, nb::handle original, const Bridge& bridge) {
  if (const auto* value = node.get_if<Value>()) return from_value(*value, original, bridge);
  if (const auto* view = node.get_if<TensorView>()) return from_tensor(*view, original, bridge);
  if (const auto* tensor = node.get_if<ShardedTensor>()) {
    return from_tensor(tensor->data, bridge.call("data_of", original), bridge);
  }
  if (const auto* object = node.get_if<ShardedObject>()) {
    return from_value(object->data, bridge.call("data_of", original), bridge);
  }
  if (const auto* kept = node.get_if<LocalNonpersistent>()) {
    return from_node(*kept->value, nb::none(), bridge);
  }
  if (const auto* dict = node.get_if<StateDict>()) return from_dict(*dict, original, bridge);
  if (const auto* list = node.get_if<StateList>()) return from_list(*list, original, bridge);
  throw Error(ErrorCode::kInternal, "a factory is left in a loaded state");
}

}  // namespace tilestone::python
