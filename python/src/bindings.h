// Declarations that the files of the binding share. Each file binds one area; module.cc is the
// table of contents. No function holds the GIL while the library works: every call that reads,
// writes or waits releases it (without_gil in call.h), and callbacks take it back (with_gil).
#pragma once

#include <Python.h>
#include <nanobind/nanobind.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "python/src/call.h"
#include "python/src/casters.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/tilestone.h"

namespace tilestone::python {

namespace nb = nanobind;

void bind_errors(nb::module_& m);
void bind_log(nb::module_& m);
void bind_geometry(nb::module_& m);
void bind_tensor(nb::module_& m);
void bind_value(nb::module_& m);
void bind_entities(nb::module_& m);
void bind_plan(nb::module_& m);
void bind_comm(nb::module_& m);
void bind_threads(nb::module_& m);
void bind_options(nb::module_& m);
void bind_places(nb::module_& m);
void bind_stores(nb::module_& m);
void bind_engine(nb::module_& m);
void bind_checkpoint(nb::module_& m);
void bind_access(nb::module_& m);
void bind_unpublished(nb::module_& m);
void bind_session(nb::module_& m);
void bind_foreign_save(nb::module_& m);
void bind_convert(nb::module_& m);
void bind_delta(nb::module_& m);
void bind_async(nb::module_& m);
void bind_manager(nb::module_& m);
void bind_fast_tier(nb::module_& m);
void bind_megatron_run(nb::module_& m);
void bind_cli(nb::module_& m);

// ---- Python objects inside the library ----

// A strong reference that any thread may copy and drop, with or without the GIL. The copies share
// one count; when the last copy is dropped, the reference is released by drop_reference().
std::shared_ptr<const void> keep_alive(nb::handle object);
// The object from which keep_alive made `owner`; an invalid handle for any other owner.
nb::handle kept_object(const std::shared_ptr<const void>& owner);

// The tilestone._torch.devices.DeviceTensor of a Python tensor on a device.
nb::handle device_object(const TensorView& tensor);

// A node that carries a Python object through the library: an empty tensor that owns the object.
// For nodes that the library only hands back (LocalNonpersistent, merged factories).
StateNode object_node(nb::handle object);

// What __repr__ shows: "Name(a=1, b='x')", of these attributes; of a list its length.
nb::str shown(nb::handle self, const std::vector<const char*>& names);

// ---- Exceptions and messages ----

// A Python string from text that may contain paths, which need not be UTF-8. Invalid bytes become
// surrogate escapes, so Python's own functions accept a path from it.
nb::str python_text(std::string_view text);

// An Error for a Python exception, with the exception as its cause: other ranks get the error, the
// caller on this rank gets the exception. A CheckpointError keeps its code. Needs the GIL.
Error error_of(const nb::python_error& raised, const std::string& what);
// The exception of tilestone._errors for an Error. Needs the GIL.
nb::object exception_of(const Error& error);

struct Message {
  LogLevel level;
  std::string text;
};

// Passes the messages to Python's logging. Returns the first exception that a handler raised. Needs
// the GIL.
std::optional<Raised> deliver(const std::vector<Message>& messages);
// Sets the library's log level to that of Python's logger. Needs the GIL.
void follow_log_level();

// Runs a Python callback from any thread of the library by `run`, which is run_in_python or
// run_in_python_here. `what` describes the callback. If it raises, the exception gets the note
// "in `what`" and becomes an Error (error_of).
template <typename Run, typename Work>
auto with_gil_by(const Run& run, const std::string& what, Work&& work) {
  const auto translated = [&] {
    try {
      return work();
    } catch (const nb::python_error& raised) {
      Raised(raised).add_note("in " + what);
      throw error_of(raised, what);
    } catch (const std::bad_cast&) {
      throw Error(ErrorCode::kInvalidArgument, what + " returned an object of another type");
    }
  };
  using Result = std::invoke_result_t<Work&>;
  if constexpr (std::is_void_v<Result>) {
    run(translated);
  } else {
    std::optional<Result> result;
    run([&] { result.emplace(translated()); });
    return *std::move(result);
  }
}

template <typename Work>
auto with_gil(const std::string& what, Work&& work) {
  return with_gil_by(run_in_python, what, work);
}
template <typename Work>
auto with_gil_here(const std::string& what, Work&& work) {
  return with_gil_by(run_in_python_here, what, work);
}

// ---- Trees ----

// The Python side of one call: the functions of a tilestone._calls.binding.Bridge, which says what
// each does, and its facts. They are looked up when this is made. Any thread may copy it; calling a
// function needs the GIL.
class Bridge {
 public:
  explicit Bridge(nb::handle object);

  bool for_load, keeps_keys;
  int everywhere;
  nb::handle copied_back;  // the class of view owners whose finish() returns the array
  // Of trees.
  nb::handle describe, is_entity, optimizer_places, variable, check_container, log_attributes;
  // Of loaded trees.
  nb::handle replaced, stand_in_of, restored, data_of, rebuilt, filled_by, note_filled;
  // Of leaves.
  nb::handle describe_in_value, pickle, make_array, make_variable, make_dtype, make_ordered_dict,
      make_opaque;

 private:
  std::shared_ptr<const void> kept_;  // keeps the functions alive
};

nb::bytes python_bytes(ByteView bytes);
ByteView byte_view(const nb::bytes& bytes);        // valid as long as the object
SharedBytes shared_bytes(const nb::bytes& bytes);  // without a copy
Bytes to_bytes_owned(const nb::bytes& bytes);

// The paths for LoadOptions's fields of these names that the Stateful objects of a tree, and the
// state dicts of optimizers, add.
struct Claims {
  std::vector<Path> complete;
  std::vector<Path> subtrees;
  std::vector<Path> unmade;
  std::vector<Path> kept_empty;
};

// A path from the result of os.fsencode.
inline std::string path_of(const nb::bytes& path) { return {path.c_str(), path.size()}; }
// The location at a path. `follow_links`: files are read through any symbolic link that leads out
// of it.
inline Location location_of(const nb::bytes& path, bool follow_links) {
  const Location location(path_of(path));
  return follow_links ? location.following_links() : location;
}

// Throw Error(kInvalidArgument) with the path of an object that can't be saved.
StateNode to_node(nb::handle object, const Bridge& bridge, const Path& path = {});
StateDict to_state(nb::handle mapping, const Bridge& bridge, Claims* claims = nullptr);
// `original` is the template's object for the node, or None. The result keeps its keys, container
// types and kinds of arrays.
nb::object from_node(const StateNode& node, nb::handle original, const Bridge& bridge);
// A whole loaded tree. Tells the bridge which arrays were filled in place. `kept`: leaves that are
// taken from the original because they were not loaded.
nb::object from_state(const StateDict& loaded, nb::handle original, const Bridge& bridge,
                      const KeptLeaves& kept);

// A leaf as a Value; an object that a Value can't represent is pickled. Errors name the path.
Value to_value(nb::handle object, const Bridge& bridge, const Path& path);
nb::object from_value(const Value& value, nb::handle original, const Bridge& bridge);
// The key of a dict: a scalar of a plain type, or a tuple of these; nullopt for any other key. With
// kAny, numpy's numbers and those of other classes count as Python's, and ints have 64 bits.
enum class Numbers { kOfPython, kAny };
std::optional<Value> value_of_key(nb::handle key, Numbers numbers, int depth = 0);

// An array over the view's memory, or the Python object that owns the memory.
nb::object from_tensor(const TensorView& view, nb::handle original, const Bridge& bridge);

DType dtype_named(std::string_view name);  // Error(kInvalidArgument) for an unknown name

// A communicator from a Python object: None (a group of one rank), a Communicator, or an object
// with rank, size, describe, gather, scatter, broadcast and all_to_all.
Communicator to_communicator(nb::handle object);

// A Python function from key to key, or a list of rules, for LoadOptions::rename and
// ConvertOptions::rename_by.
std::function<std::string(const std::string&)> renaming(nb::handle function);

// `callback`: progress(phase, bytes_done, bytes_total, seconds), or None.
ProgressFn to_progress(nb::handle callback);

}  // namespace tilestone::python
