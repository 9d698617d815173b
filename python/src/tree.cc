// State dicts: Python's containers, tensors and entities as nodes and back.
#include <numeric>
#include <unordered_set>

#include "python/src/bindings.h"
#include "python/src/dlpack.h"

namespace tilestone::python {
namespace {

constexpr size_t kDepthLimit = 200;

std::string to_text(nb::handle text) {
  Py_ssize_t size = 0;
  const char* utf8 = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (utf8 == nullptr) throw nb::python_error();
  return {utf8, static_cast<size_t>(size)};
}

// As torch flattens: text and ints as they are, any other key by its str().
PathElement path_element(nb::handle key) {
  if (PyUnicode_CheckExact(key.ptr())) return to_text(key);
  if (PyLong_CheckExact(key.ptr())) {
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(key.ptr(), &overflow);
    if (overflow == 0) return static_cast<int64_t>(number);
  }
  return to_text(nb::str(key));
}

// Keys of one dict are distinct, but others than text and ints may be written alike.
void check_distinct(const StateDict& dict, const Path& path) {
  std::unordered_set<PathElement> seen;
  for (const auto& [key, node] : dict.entries()) {
    if (seen.insert(key).second) continue;
    Path twice = path;
    twice.push_back(key);
    throw Error(ErrorCode::kInvalidArgument,
                "two keys of one dict are the same when they are written as text")
        .with_key(dotted(twice));
  }
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

// Python's objects as nodes.
class TreeMaker {
 public:
  explicit TreeMaker(const Bridge& bridge)
      : bridge_(bridge), everywhere_(nb::cast<int>(bridge.call("everywhere"))) {}

  StateNode node(nb::handle object, const Path& path) const {
    if (PyDict_Check(object.ptr())) return dict(object, path);
    if (PyList_CheckExact(object.ptr())) {
      if (path.size() <= kDepthLimit && is_descended(object, path.size())) {
        return list(object, path);
      }
      return to_value(object, bridge_);
    }
    if (is_plain(object)) return to_value(object, bridge_);
    if (auto view = torch_view(object, path)) return array(*std::move(view), path);
    if (auto entity = from_described(bridge_.call("describe", object, dotted(path)), path)) {
      return *std::move(entity);
    }
    if (is_mapping(object)) return dict(object, path);
    return to_value(object, bridge_);
  }

  StateDict dict(nb::handle mapping, const Path& path) const {
    if (path.size() > kDepthLimit) {
      throw Error(ErrorCode::kInvalidArgument,
                  "the state dict is nested deeper than " + std::to_string(kDepthLimit) + " levels")
          .with_key(dotted(path));
    }
    StateDict out;
    auto& entries = out.entries();
    bool distinct = PyDict_CheckExact(mapping.ptr()) || PyODict_CheckExact(mapping.ptr());
    nb::object items = mapping.attr("items")();
    Path below = path;
    below.emplace_back();
    for (nb::handle pair : items) {
      nb::object key = pair[0];
      nb::object item = pair[1];
      below.back() = path_element(key);
      const bool is_int = std::holds_alternative<int64_t>(below.back());
      distinct = distinct && (is_int || PyUnicode_CheckExact(key.ptr()));
      entries.emplace_back(below.back(), node(item, below));
    }
    if (!distinct) check_distinct(out, path);
    return out;
  }

 private:
  // As torch flattens: a list is taken apart when a dict or a tensor is in it, or in a list in it.
  bool is_descended(nb::handle list, size_t depth) const {
    if (depth > kDepthLimit) return false;
    for (nb::handle item : nb::borrow<nb::list>(list)) {
      if (is_plain(item)) continue;
      if (PyList_CheckExact(item.ptr())) {
        if (is_descended(item, depth + 1)) return true;
      } else if (is_mapping(item) || nb::cast<bool>(bridge_.call("is_entity", item))) {
        return true;
      }
    }
    return false;
  }

  StateList list(nb::handle list, const Path& path) const {
    StateList out;
    Path below = path;
    below.emplace_back();
    int64_t index = 0;
    for (nb::handle item : nb::borrow<nb::list>(list)) {
      below.back() = index++;
      out.push_back(node(item, below));
    }
    return out;
  }

  std::optional<TensorView> torch_view(nb::handle object, const Path& path) const {
    try {
      return torch_tensors_.find_view(object, bridge_.for_load());
    } catch (Error& error) {
      error.with_key(dotted(path));
      throw;
    }
  }

  // A plain array; by rule, one that every rank is known to hold.
  StateNode array(TensorView view, const Path& path) const {
    if (everywhere_ == 0) return view;
    const Dims shape = view.shape;
    auto tensor = ShardedTensor::from_box(dotted(path), std::move(view), shape, Box::whole(shape));
    std::vector<int> ranks(static_cast<size_t>(everywhere_));
    std::iota(ranks.begin(), ranks.end(), 0);
    tensor.declare_replicas(std::move(ranks));
    return tensor;
  }

  // An array or entity that the bridge made, or nothing.
  std::optional<StateNode> from_described(nb::handle described, const Path& path) const {
    if (described.is_none()) return std::nullopt;
    if (nb::isinstance<TensorView>(described)) return array(nb::cast<TensorView>(described), path);
    if (nb::isinstance<ShardedTensor>(described)) return nb::cast<ShardedTensor>(described);
    if (nb::isinstance<ShardedObject>(described)) return nb::cast<ShardedObject>(described);
    if (nb::isinstance<ShardedTensorFactory>(described)) {
      return nb::cast<ShardedTensorFactory>(described);
    }
    if (nb::isinstance<LocalNonpersistent>(described)) {
      return nb::cast<LocalNonpersistent>(described);
    }
    return std::nullopt;
  }

  const Bridge& bridge_;
  const int everywhere_;  // how many ranks hold each plain array; 0: that is not known
  const TorchTensors torch_tensors_;
};

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
  return TreeMaker(bridge).node(object, path);
}

StateDict to_state(nb::handle mapping, const Bridge& bridge) {
  if (!is_mapping(mapping)) {
    throw Error(ErrorCode::kInvalidArgument,
                "a state is a dict, not " +
                    nb::cast<std::string>(nb::str(mapping.type().attr("__name__"))));
  }
  return TreeMaker(bridge).dict(mapping, {});
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
