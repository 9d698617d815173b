// What the files of the binding share. Each file binds one area; module.cc is the table of
// contents. Nothing here holds the GIL while the library works: every call that reads, writes or
// waits releases it (without_gil in call.h), and callbacks take it back (with_gil).
#pragma once

#include <Python.h>
#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "python/src/call.h"
#include "python/src/casters.h"
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
void bind_engine(nb::module_& m);
void bind_checkpoint(nb::module_& m);
void bind_access(nb::module_& m);
void bind_storage(nb::module_& m);
void bind_unpublished(nb::module_& m);
void bind_session(nb::module_& m);
void bind_steps(nb::module_& m);
void bind_cli(nb::module_& m);

// ---- Python objects inside the library ----

// A strong reference that any thread may copy and drop: copies share a count of their own, the
// last one takes the GIL.
std::shared_ptr<const void> keep_alive(nb::handle object);
// The object that keep_alive made `owner` of; an invalid handle for any other owner.
nb::handle kept_object(const std::shared_ptr<const void>& owner);

// A node that stands for a Python object on its way through the library: an empty tensor that
// owns it. Used where the library only hands a node back (LocalNonpersistent, merged factories).
StateNode object_node(nb::handle object);

// ---- Exceptions and messages ----

// Text that may hold paths, which need not be UTF-8: Python's own functions take what comes out as
// a path again.
nb::object python_text(std::string_view text);

// The Python exception in flight as an Error that keeps it as its cause: other ranks get the error,
// this one's caller gets the exception. A CheckpointError keeps its code. With the GIL held.
Error error_of(const nb::python_error& raised, const std::string& what);
// The exception of tilestone._errors that an Error becomes. With the GIL held.
nb::object exception_of(const Error& error);

struct Message {
  LogLevel level;
  std::string text;
};

// Hands the messages to Python's logging; what a handler raised first. With the GIL held.
std::optional<Raised> deliver(const std::vector<Message>& messages);
// Makes the library drop what Python's logging would drop. With the GIL held.
void follow_log_level();

// Runs a Python callback from any thread of the library (see run_in_python). What it raises
// becomes an Error that says whose callback it was.
template <typename Work>
auto with_gil(const std::string& what, Work&& work) {
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
    run_in_python(translated);
  } else {
    std::optional<Result> result;
    run_in_python([&] { result.emplace(translated()); });
    return *std::move(result);
  }
}

// ---- Trees ----

// The Python side of one call: an object of tilestone._bridge.Bridge, whose methods the binding
// calls. Any thread may copy it; calling needs the GIL.
class Bridge {
 public:
  explicit Bridge(nb::handle object)
      : object_(keep_alive(object)), for_load_(nb::cast<bool>(object.attr("for_load"))) {}

  bool for_load() const { return for_load_; }
  template <typename... Args>
  nb::object call(const char* method, Args&&... args) const {
    return kept_object(object_).attr(method)(std::forward<Args>(args)...);
  }

 private:
  std::shared_ptr<const void> object_;
  bool for_load_;
};

Bytes to_bytes_owned(const nb::bytes& bytes);

// What the Stateful objects of a tree claim; see LoadOptions.
struct Claims {
  std::vector<Path> complete;
  std::vector<Path> subtrees;
};

// A path as os.fsencode gives it.
inline std::string path_of(const nb::bytes& path) { return {path.c_str(), path.size()}; }
// The location there; whether files are read through any symbolic link that leads out of it.
inline Location location_of(const nb::bytes& path, bool follow_links) {
  PosixOptions options;
  if (follow_links) options.links = PosixOptions::Links::kAll;
  return {path_of(path), options};
}

// Throws Error(kInvalidArgument) naming the path of what can't be saved.
StateNode to_node(nb::handle object, const Bridge& bridge, const Path& path = {});
StateDict to_state(nb::handle mapping, const Bridge& bridge, Claims* claims = nullptr);
// `original` is the object that the node came from (or none): its keys, container types and kinds
// of array are kept.
nb::object from_node(const StateNode& node, nb::handle original, const Bridge& bridge);
// A whole loaded tree; the bridge gets to know which arrays were filled in place. `kept`: leaves
// that are the original's own.
nb::object from_state(const StateDict& loaded, nb::handle original, const Bridge& bridge,
                      const KeptLeaves& kept);

// A leaf: a Value, pickled where it is none. Errors name the path.
Value to_value(nb::handle object, const Bridge& bridge, const Path& path);
nb::object from_value(const Value& value, nb::handle original, const Bridge& bridge);

// An array over the view's memory, or the object that the view was made from.
nb::object from_tensor(const TensorView& view, nb::handle original, const Bridge& bridge);

DType dtype_named(std::string_view name);  // Error(kInvalidArgument) for an unknown name

// A Python object as a communicator: None (a group of one), a Communicator, or an object with
// rank, size, describe, gather, scatter, broadcast and all_to_all.
Communicator to_communicator(nb::handle object);

CachePolicy cache_named(const std::string& name);  // "bypass", "keep"

// progress(phase, bytes_done, bytes_total, seconds), or None.
ProgressFn to_progress(nb::handle callback);

}  // namespace tilestone::python
