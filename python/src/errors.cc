// tilestone::Error to the exceptions of tilestone._errors, and back.
#include <array>
#include <exception>

#include "python/src/bindings.h"

namespace tilestone::python {
namespace {

void raise(const Error& error) {
  try {
    nb::object make = nb::module_::import_("tilestone._errors").attr("make_error");
    nb::object raised = make(to_string(error.code()), error.what(), error.message(), error.key(),
                             error.file(), error.rank(), error.hint(), error.sys_errno());
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
  } catch (nb::python_error& failed) {
    failed.restore();
  }
}

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    raise(error);
  }
}

std::string text_attribute(nb::handle object, const char* name) {
  nb::object value = nb::getattr(object, name, nb::none());
  return nb::isinstance<nb::str>(value) ? nb::cast<std::string>(value) : std::string();
}

int int_attribute(nb::handle object, const char* name, int otherwise) {
  nb::object value = nb::getattr(object, name, nb::none());
  return PyLong_Check(value.ptr()) ? nb::cast<int>(value) : otherwise;
}

ErrorCode code_named(const std::string& name) {
  for (int i = static_cast<int>(ErrorCode::kInvalidArgument);
       i <= static_cast<int>(ErrorCode::kInterrupted); ++i) {
    const auto code = static_cast<ErrorCode>(i);
    if (to_string(code) == name) return code;
  }
  return ErrorCode::kInternal;
}

}  // namespace

Error error_of(const nb::python_error& raised, const std::string& what) {
  nb::handle value = raised.value();
  nb::object ours = nb::module_::import_("tilestone._errors").attr("CheckpointError");
  if (PyObject_IsInstance(value.ptr(), ours.ptr()) != 1) {
    const std::string type = nb::cast<std::string>(nb::str(value.type().attr("__name__")));
    nb::object text = nb::steal(PyObject_Str(value.ptr()));
    if (!text.is_valid()) PyErr_Clear();
    return Error(ErrorCode::kInvalidArgument,
                 what + " raised " + type + ": " +
                     (text.is_valid() ? nb::cast<std::string>(text) : std::string()));
  }
  Error error(code_named(text_attribute(value, "code")), text_attribute(value, "message"));
  if (auto key = text_attribute(value, "key"); !key.empty()) error.with_key(key);
  if (auto file = text_attribute(value, "file"); !file.empty()) error.with_file(file);
  if (int rank = int_attribute(value, "rank", -1); rank >= 0) error.with_rank(rank);
  if (auto hint = text_attribute(value, "hint"); !hint.empty()) error.with_hint(hint);
  if (int number = int_attribute(value, "errno", 0); number != 0) error.with_errno(number);
  return error;
}

void bind_errors(nb::module_&) { nb::register_exception_translator(translate); }

}  // namespace tilestone::python
