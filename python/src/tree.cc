// Converts state dicts: Python's containers, tensors and entities to nodes, and back.
#include <algorithm>
#include <numeric>
#include <unordered_map>
#include <unordered_set>

#include "python/src/bindings.h"
#include "python/src/dlpack.h"

namespace tilestone::python {
namespace {

constexpr size_t kDepthLimit = 200;

std::string to_text(nb::handle text) {
  Py_ssize_t size = 0;
  const char* utf8 = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (utf8 == nullptr) {  // a lone surrogate
    PyErr_Clear();
    const nb::object shown = nb::steal(PyObject_ASCII(text.ptr()));
    throw Error(ErrorCode::kInvalidArgument, "a key of a dict can't be encoded as UTF-8")
        .with_key(shown.is_valid() ? nb::cast<std::string>(shown) : std::string());
  }
  return {utf8, static_cast<size_t>(size)};
}

// The path element for a key, as torch flattens dicts: strings and ints unchanged, any other key as
// its str().
PathElement path_element(nb::handle key) {
  if (PyUnicode_CheckExact(key.ptr())) return to_text(key);
  if (PyLong_CheckExact(key.ptr())) {
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(key.ptr(), &overflow);
    if (overflow == 0) return static_cast<int64_t>(number);
  }
  return to_text(nb::str(key));
}

// Two different keys of one dict, if they are neither strings nor ints, may have the same str().
void check_distinct(const StateDict& dict, const Path& path) {
  std::unordered_set<PathElement> seen;
  for (const auto& [key, node] : dict.entries()) {
    if (seen.insert(key).second) continue;
    Path twice = path;
    twice.push_back(key);
    throw Error(ErrorCode::kInvalidArgument,
                "two keys of one dict are the same when they are converted to strings")
        .with_key(dotted(twice));
  }
}

bool is_mapping(nb::handle object) {
  if (PyDict_Check(object.ptr())) return true;
  if (!PyMapping_Check(object.ptr())) return false;
  nb::object mapping = nb::module_::import_("collections.abc").attr("Mapping");
  return PyObject_IsInstance(object.ptr(), mapping.ptr()) == 1;
}

// The type itself is not in the stable ABI. No static object with a guard, because the import may
// let another thread have the GIL.
bool is_ordered_dict(nb::handle object) {
  static PyObject* type = nullptr;
  if (type == nullptr) {
    type = nb::object(nb::module_::import_("collections").attr("OrderedDict")).release().ptr();
  }
  return object.type().ptr() == type;
}

bool is_plain_dict(nb::handle object) {
  return PyDict_CheckExact(object.ptr()) || is_ordered_dict(object);
}

// Whether an object is certainly neither a tensor nor a container of tensors.
bool is_plain(nb::handle object) {
  PyObject* o = object.ptr();
  return o == Py_None || PyLong_Check(o) || PyFloat_Check(o) || PyUnicode_Check(o) ||
         PyBytes_Check(o) || PyTuple_CheckExact(o);
}

// Returns the result of `call`. Tilestone's own errors get the path as their key if they have none.
template <typename PythonCall>
auto keyed(const Path& path, const PythonCall& call) {
  try {
    return call();
  } catch (Error& error) {
    error.with_key(dotted(path));
    throw;
  } catch (const nb::python_error& raised) {
    nb::object ours = nb::module_::import_("tilestone._errors").attr("CheckpointError");
    if (raised.matches(ours)) {
      raised.value().attr("add_key")(python_text(dotted(path)));
      throw error_of(raised, "the state dict");
    }
    if (!nb::hasattr(raised.value(), "__notes__")) {
      Raised(raised).add_note("at the key \"" + dotted(path) + "\" of the state dict");
    }
    throw;
  }
}

// Makes nodes from Python's objects.
class TreeMaker {
 public:
  // `claims` (may be null) receives the claims of the tree's Stateful objects.
  TreeMaker(const Bridge& bridge, Claims* claims) : bridge_(bridge), claims_(claims) {}

  StateNode node(nb::handle object, const Path& path) const {
    if (is_ordered_dict(object)) log_attributes(object, path);
    if (is_plain_dict(object))
      return is_whole(object, path) ? leaf(object, path) : dict(object, path);
    if (PyList_CheckExact(object.ptr())) return list_or_leaf(object, path);
    if (is_plain(object)) return leaf(object, path);
    if (auto view = torch_view(object, path)) return tensor(object, *std::move(view), path);
    const nb::object described =
        keyed(path, [&] { return bridge_.describe(object, dotted(path)); });
    if (PyTuple_CheckExact(described.ptr())) return stateful(described, path);
    if (nb::isinstance<TensorView>(described)) {
      return tensor(object, nb::cast<TensorView>(described), path);
    }
    if (auto entity = from_described(described)) return *std::move(entity);
    if (is_mapping(object)) return dict(checked_container(object, path), path);
    if (PyList_Check(object.ptr())) return list_or_leaf(object, path);
    return leaf(object, path);
  }

  StateDict dict(nb::handle mapping, const Path& path) const {
    const Inside inside(*this, mapping, path);
    claim_of_optimizer(mapping, path);
    StateDict out;
    auto& entries = out.entries();
    if (PyDict_Check(mapping.ptr()))
      entries.reserve(static_cast<size_t>(PyDict_Size(mapping.ptr())));
    bool distinct = is_plain_dict(mapping);
    nb::object items = mapping.attr("items")();
    Path below = path;
    below.emplace_back();
    for (nb::handle pair : items) {
      nb::object key = pair[0];
      nb::object item = pair[1];
      below.back() = path_element(key);
      const bool is_int = std::holds_alternative<int64_t>(below.back());
      distinct = distinct && (is_int || PyUnicode_CheckExact(key.ptr()));
      if (!is_int && !PyUnicode_CheckExact(key.ptr())) {
        if (auto original = value_of_key(key, Numbers::kAny)) {
          out.original_keys().emplace(std::get<std::string>(below.back()), *std::move(original));
        }
      }
      if (bridge_.keeps_keys && !is_writable_key(key)) check_holds_sharded(item, below);
      entries.emplace_back(below.back(), node(item, below));
    }
    if (!distinct) check_distinct(out, path);
    return out;
  }

 private:
  // A container whose items are being made. Throws if the container contains itself; the error
  // names the first place where it does.
  class Inside {
   public:
    Inside(const TreeMaker& maker, nb::handle container, const Path& path)
        : above_(maker.containers_) {
      const auto same = std::find(above_.begin(), above_.end(), container.ptr());
      if (same != above_.end()) {
        throw Error(ErrorCode::kInvalidArgument, "a container holds itself").with_key(dotted(path));
      }
      check_depth(path);
      above_.push_back(container.ptr());
    }
    ~Inside() { above_.pop_back(); }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    std::vector<PyObject*>& above_;
  };

  // Whether a load of the common state returns an equal key.
  static bool is_writable_key(nb::handle key) {
    return PyUnicode_Check(key.ptr()) ||
           (PyLong_CheckExact(key.ptr()) && std::holds_alternative<int64_t>(path_element(key)));
  }

  // Whether a dict is stored as one value of the common state because of its keys, such as (1, 2),
  // None or a dtype.
  bool is_whole(nb::handle dict, const Path& path) const {
    if (!bridge_.keeps_keys || path.empty()) return false;
    bool some = false;
    for (auto [key, item] : nb::borrow<nb::dict>(dict)) {
      some = some || !is_writable_key(key);
    }
    std::unordered_set<PyObject*> seen;
    return some && !holds_sharded(dict, path, seen);
  }

  // Whether a tree contains something that is not common state. `seen`: containers visited before.
  bool holds_sharded(nb::handle object, const Path& path,
                     std::unordered_set<PyObject*>& seen) const {
    if (is_plain(object)) return false;
    const bool is_dict = PyDict_Check(object.ptr());
    if (!is_dict && !PyList_Check(object.ptr())) {
      return !torch_view(object, path) && nb::cast<bool>(bridge_.is_entity(object));
    }
    check_depth(path);
    if (!seen.insert(object.ptr()).second) return false;
    Path below = path;
    below.emplace_back();
    nb::object items = is_dict ? nb::object(object.attr("values")()) : nb::borrow(object);
    return std::any_of(items.begin(), items.end(),
                       [&](nb::handle item) { return holds_sharded(item, below, seen); });
  }

  // For a key that is neither a string nor an int. A load takes the keys of sharded parts from the
  // template, but those of common state come back as strings, so the latter are refused.
  void check_holds_sharded(nb::handle object, const Path& path) const {
    std::unordered_set<PyObject*> seen;
    if (holds_sharded(object, path, seen)) return;
    throw Error(ErrorCode::kInvalidArgument,
                "a key of the common state that is neither a string nor a 64-bit int would come "
                "back as a string here")
        .with_key(dotted(path))
        .with_hint(
            "such a key is kept in a plain dict that is below the top level and holds no sharded "
            "entities");
  }

  static void check_depth(const Path& path) {
    if (path.size() <= kDepthLimit) return;
    throw Error(ErrorCode::kInvalidArgument,
                "the state dict is nested deeper than " + std::to_string(kDepthLimit) + " levels")
        .with_key(dotted(path));
  }

  StateNode leaf(nb::handle object, const Path& path) const {
    return keyed(path, [&] { return to_value(object, bridge_, path); });
  }

  // The state dict of a Stateful object. `described`: (state dict, subtrees, kept_empty).
  StateNode stateful(nb::handle described, const Path& path) const {
    if (claims_ != nullptr) {
      claims_->complete.push_back(path);
      claim(nb::object(described[1]), path, claims_->subtrees);
      claim(nb::object(described[2]), path, claims_->kept_empty);
    }
    return node(nb::object(described[0]), path);
  }

  // A dict may be the state dict of an optimizer.
  void claim_of_optimizer(nb::handle mapping, const Path& path) const {
    if (claims_ == nullptr) return;
    const int has_groups = PySequence_Contains(mapping.ptr(), nb::str("param_groups").ptr());
    if (has_groups < 0) throw nb::python_error();
    if (has_groups == 0) return;
    const nb::object places = bridge_.optimizer_places(mapping);
    claim(nb::object(places[0]), path, claims_->subtrees);
    claim(nb::object(places[1]), path, claims_->unmade);
  }

  // Adds paths below `path`.
  static void claim(nb::handle below, const Path& path, std::vector<Path>& claimed) {
    for (nb::handle keys : below) {
      Path& whole = claimed.emplace_back(path);
      for (nb::handle key : keys) whole.push_back(path_element(key));
    }
  }

  // Checks that a container of a special class can be recreated with other contents; returns it.
  nb::handle checked_container(nb::handle container, const Path& path) const {
    keyed(path, [&] { return bridge_.check_container(container); });
    log_attributes(container, path);
    return container;
  }

  // Logs what a container has beside its items, as that is not saved.
  void log_attributes(nb::handle container, const Path& path) const {
    PyObject* attributes = PyObject_GenericGetDict(container.ptr(), nullptr);
    const nb::object kept = nb::steal(attributes);
    if (attributes == nullptr) PyErr_Clear();
    const bool some = attributes == nullptr || PyDict_Size(attributes) > 0;
    if (!bridge_.for_load && (some || !is_ordered_dict(container))) {
      bridge_.log_attributes(container, dotted(path));
    }
  }

  StateNode list_or_leaf(nb::handle list_object, const Path& path) const {
    check_depth(path);
    std::unordered_set<PyObject*> seen;
    const bool asks = bridge_.for_load && PyList_CheckExact(list_object.ptr());
    if (asks && PyList_Size(list_object.ptr()) == 0) return StateList();  // for what is stored
    if (!is_descended(list_object, path.size(), seen)) return leaf(list_object, path);
    if (!PyList_CheckExact(list_object.ptr())) checked_container(list_object, path);
    return list(list_object, path);
  }

  // Whether a list is split into its elements, as torch does: if it, or a list inside it, holds a
  // dict, a tensor or a Stateful object. `seen`: lists visited before, because a list may contain
  // itself.
  bool is_descended(nb::handle list, size_t depth, std::unordered_set<PyObject*>& seen) const {
    if (depth > kDepthLimit || !seen.insert(list.ptr()).second) return false;
    for (nb::handle item : nb::borrow<nb::list>(list)) {
      if (is_plain(item)) continue;
      if (is_mapping(item) || nb::cast<bool>(bridge_.is_entity(item))) return true;
      if (PyList_Check(item.ptr()) && is_descended(item, depth + 1, seen)) return true;
    }
    return false;
  }

  StateList list(nb::handle list, const Path& path) const {
    const Inside inside(*this, list, path);
    StateList out;
    Path below = path;
    below.emplace_back();
    int64_t index = 0;
    for (nb::handle item : nb::borrow<nb::list>(list)) {
      below.back() = index++;
      out.push_back(node(item, below));
      if (out.back().get_if<LocalNonpersistent>() != nullptr) check_keeps_place(item, below);
    }
    return out;
  }

  // What is not saved leaves a list, which moves the elements after it. That must be the caller's
  // wish: an object of which only this rank holds nothing would move them on this rank alone.
  static void check_keeps_place(nb::handle item, const Path& path) {
    const nb::module_ parts = nb::module_::import_("tilestone._torch.parts");
    if (!nb::cast<bool>(parts.attr("states_position")(item))) return;
    throw Error(ErrorCode::kInvalidArgument,
                "this rank holds no part of the tensor and can't know its shape, so the object "
                "can't keep its place in a list")
        .with_key(dotted(path))
        .with_hint("put objects of which some ranks hold nothing into a dict");
  }

  std::optional<TensorView> torch_view(nb::handle object, const Path& path) const {
    try {
      return keyed(path, [&] { return torch_tensors_.find_view(object, bridge_.for_load); });
    } catch (const nb::python_error&) {
      return std::nullopt;  // a wrapper without memory, which the bridge handles
    }
  }

  // An array. In the common state, a tensor that autograd tracks comes back as it was, as in a
  // leaf.
  StateNode tensor(nb::handle object, TensorView view, const Path& path) const {
    if (!bridge_.keeps_keys) return array(std::move(view), path);
    const nb::object found = keyed(path, [&] { return bridge_.variable(object); });
    if (found.is_none()) return array(std::move(view), path);
    const Autograd autograd{nb::cast<bool>(found[1]), nb::cast<bool>(found[2])};
    return Value(nb::cast<TensorView>(found[0]), autograd);
  }

  // A plain array. If the ranks plan by rule, it is a tensor that every rank is known to hold.
  StateNode array(TensorView view, const Path& path) const {
    if (bridge_.everywhere == 0) return view;
    const Dims shape = view.shape;
    auto tensor = ShardedTensor::from_box(dotted(path), std::move(view), shape, Box::whole(shape));
    std::vector<int> ranks(static_cast<size_t>(bridge_.everywhere));
    std::iota(ranks.begin(), ranks.end(), 0);
    tensor.declare_replicas(std::move(ranks));
    tensor.common = true;
    return tensor;
  }

  // An entity that the bridge made, or nothing.
  static std::optional<StateNode> from_described(nb::handle described) {
    if (described.is_none()) return std::nullopt;
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
  Claims* const claims_;
  const TorchTensors torch_tensors_;
  mutable std::vector<PyObject*> containers_;  // those around the current node, outermost first
};

// The keys of a template's dict that are neither plain strings nor ints, by the string that they
// became. Examples are members of an Enum and objects of a subclass of str.
class OriginalKeys {
 public:
  explicit OriginalKeys(nb::handle original) {
    if (original.is_none()) return;
    for (nb::handle key : original) {
      if (PyUnicode_CheckExact(key.ptr())) continue;
      const PathElement element = path_element(key);
      if (const auto* text = std::get_if<std::string>(&element)) {
        keys_.emplace(*text, nb::borrow(key));
      }
    }
  }

  nb::object of(const PathElement& element) const {
    if (const auto* number = std::get_if<int64_t>(&element)) return nb::int_(*number);
    const std::string& text = std::get<std::string>(element);
    const auto known = keys_.find(text);
    return known != keys_.end() ? known->second : nb::str(text.data(), text.size());
  }

 private:
  std::unordered_map<std::string, nb::object> keys_;
};

nb::object item_of(nb::handle original, nb::handle key) {
  if (!original.is_valid() || original.is_none()) return nb::none();
  if (PyDict_Check(original.ptr()) && PyDict_Contains(original.ptr(), key.ptr()) != 1) {
    PyErr_Clear();
    return nb::none();  // asking a defaultdict would add the key
  }
  PyObject* item = PyObject_GetItem(original.ptr(), key.ptr());
  if (item == nullptr) PyErr_Clear();
  return item == nullptr ? nb::object(nb::none()) : nb::steal(item);
}

// Makes Python's objects from nodes, and records which tensors were filled in place.
class TreeReader {
 public:
  // `kept`: leaves that are taken from the template; null if there are none.
  explicit TreeReader(const Bridge& bridge, const KeptLeaves* kept = nullptr)
      : bridge_(bridge), kept_(kept) {
    for (nb::handle id : bridge.replaced()) replaced_.insert(nb::cast<uintptr_t>(id));
  }

  const nb::list& filled() const { return filled_; }

  nb::object node(const StateNode& node, nb::handle original) {
    if (is_kept(node)) {
      nb::object data = bridge_.data_of(original);
      return data.is_none() ? nb::borrow(original) : data;
    }
    if (!replaced_.contains(reinterpret_cast<uintptr_t>(original.ptr()))) {
      return content(node, original);
    }
    nb::object loaded = content(node, bridge_.stand_in_of(original));
    return keyed(path_, [&] { return bridge_.restored(original, loaded); });
  }

  nb::object dict(const StateDict& dict, nb::handle original) {
    nb::object known =
        original.is_valid() && is_mapping(original) ? nb::borrow(original) : nb::object(nb::none());
    const OriginalKeys keys(known);
    const bool is_free = known.is_none() || nb::len(known) == 0;  // no template: as saved
    nb::dict out;
    for (const auto& [element, child] : dict.entries()) {
      nb::object key = keys.of(element);
      if (is_free) {
        if (const Value* saved = original_key(dict, element)) {
          key = from_value(*saved, nb::none(), bridge_);
        }
      }
      path_.push_back(element);
      out[key] = node(child, item_of(known, key));
      path_.pop_back();
    }
    for (const auto& [key, value] : dict.others()) {
      out[from_value(key, nb::none(), bridge_)] = from_value(value, nb::none(), bridge_);
    }
    return known.is_none() || PyDict_CheckExact(known.ptr()) ? nb::object(out)
                                                             : bridge_.rebuilt(known, out);
  }

 private:
  // The key that an entry had before it became text, if it was recorded.
  static const Value* original_key(const StateDict& dict, const PathElement& element) {
    const auto* text = std::get_if<std::string>(&element);
    if (text == nullptr) return nullptr;
    const auto known = dict.original_keys().find(*text);
    return known == dict.original_keys().end() ? nullptr : &known->second;
  }

  bool is_kept(const StateNode& node) const {
    if (kept_ == nullptr || kept_->keys.empty()) return false;
    if (const auto* tensor = node.get_if<ShardedTensor>()) return kept_->keys.contains(tensor->key);
    if (const auto* object = node.get_if<ShardedObject>()) {
      return kept_->keys.contains(object->unique_key());
    }
    return !kept_->paths.empty() && kept_->paths.contains(dotted(path_));
  }

  nb::object content(const StateNode& node, nb::handle original) {
    if (const auto* value = node.get_if<Value>()) return leaf(*value, original);
    if (const auto* view = node.get_if<TensorView>()) return tensor(*view, original);
    if (const auto* sharded = node.get_if<ShardedTensor>()) {
      return tensor(sharded->data, bridge_.data_of(original));
    }
    if (const auto* object = node.get_if<ShardedObject>()) {
      return from_value(object->data, bridge_.data_of(original), bridge_);
    }
    if (const auto* kept = node.get_if<LocalNonpersistent>()) {
      return content(*kept->value, nb::none());
    }
    if (const auto* dict_node = node.get_if<StateDict>()) return dict(*dict_node, original);
    if (const auto* list_node = node.get_if<StateList>()) return list(*list_node, original);
    throw Error(ErrorCode::kInternal, "a factory is left in a loaded state");
  }

  // If the template has an array here, it is filled from the stored object.
  nb::object leaf(const Value& value, nb::handle original) {
    nb::object made = from_value(value, original, bridge_);
    if (!original.is_valid() || is_plain(original)) return made;
    return keyed(path_, [&] { return bridge_.filled_by(original, made); });
  }

  // A node without bytes may carry an object that was not loaded, see object_node.
  nb::object tensor(const TensorView& view, nb::handle original) {
    const nb::handle kept = kept_object(view.owner);
    if (!kept.is_valid()) return from_tensor(view, original, bridge_);
    const bool copied = kept.type().is(bridge_.copied_back);
    nb::object array =
        copied ? keyed(path_, [&] { return kept.attr("finish")(); }) : nb::borrow(kept);
    if (view.bytes() != 0) filled_.append(array);
    return array;
  }

  nb::object list(const StateList& list, nb::handle original) {
    nb::list out;
    int64_t index = 0;
    const bool known = original.is_valid() && PyList_Check(original.ptr());
    for (const StateNode& child : list) {
      nb::object place = known ? item_of(original, nb::int_(index)) : nb::object(nb::none());
      path_.emplace_back(index++);
      out.append(node(child, place));
      path_.pop_back();
    }
    return !known || PyList_CheckExact(original.ptr()) ? nb::object(out)
                                                       : bridge_.rebuilt(original, out);
  }

  const Bridge& bridge_;
  const KeptLeaves* const kept_;
  std::unordered_set<uintptr_t> replaced_;  // ids of objects for which stand-ins were filled
  nb::list filled_;
  Path path_;  // of the current node
};

}  // namespace

StateNode to_node(nb::handle object, const Bridge& bridge, const Path& path) {
  return TreeMaker(bridge, nullptr).node(object, path);
}

StateDict to_state(nb::handle mapping, const Bridge& bridge, Claims* claims) {
  if (!is_mapping(mapping)) {
    throw Error(ErrorCode::kInvalidArgument,
                "a state must be a dict, not " +
                    nb::cast<std::string>(nb::str(mapping.type().attr("__name__"))));
  }
  return TreeMaker(bridge, claims).dict(mapping, {});
}

nb::object from_node(const StateNode& node, nb::handle original, const Bridge& bridge) {
  return TreeReader(bridge).node(node, original);
}

nb::object from_state(const StateDict& loaded, nb::handle original, const Bridge& bridge,
                      const KeptLeaves& kept) {
  TreeReader reader(bridge, &kept);
  nb::object out = reader.dict(loaded, original);
  bridge.note_filled(reader.filled());
  return out;
}

}  // namespace tilestone::python
