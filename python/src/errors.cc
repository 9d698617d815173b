// Converts tilestone::Error to the exceptions of tilestone._errors, and back.
#include <array>
#include <exception>

#include "python/src/bindings.h"

namespace tilestone::python {
namespace {

void raise(const Error& error) {
  try {
    nb::object raised = exception_of(error);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
  } catch (nb::python_error& failed) {
    failed.restore();
  }
}

void translate(const std::exception_ptr& thrown, void*) {
  try {
    try {
      std::rethrow_exception(thrown);
    } catch (const Error&) {
      rethrow_cause();
    }
  } catch (const Raised& raised) {
    raised.restore();
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

Reason reason_named(const std::string& name) {
  for (uint8_t i = 0; i <= static_cast<uint8_t>(kLastReason); ++i) {
    if (to_string(static_cast<Reason>(i)) == name) return static_cast<Reason>(i);
  }
  return Reason::kNone;
}

Hint hint_of(nb::handle raised) {
  Hint hint;
  for (nb::handle advice : nb::getattr(raised, "advice")) {
    hint.push_back({nb::cast<std::string>(advice[0]), nb::cast<std::string>(advice[1]),
                    nb::cast<std::string>(advice[2]), nb::cast<std::string>(advice[3])});
  }
  return hint;
}

}  // namespace

nb::str python_text(std::string_view text) {
  PyObject* decoded =
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogateescape");
  if (decoded == nullptr) throw nb::python_error();
  return nb::steal<nb::str>(decoded);
}

nb::object exception_of(const Error& error) {
  nb::object make = nb::module_::import_("tilestone._errors").attr("make_error");
  nb::list hint;
  for (const Advice& advice : error.advice()) {
    hint.append(nb::make_tuple(python_text(advice.before), python_text(advice.option),
                               python_text(advice.value), python_text(advice.after)));
  }
  return make(to_string(error.code()), to_string(error.reason()), python_text(error.message()),
              python_text(error.key()), python_text(error.file()), error.rank(), hint,
              error.sys_errno());
}

Error error_of(const nb::python_error& raised, const std::string& what) {
  nb::handle value = raised.value();
  const Raised kept(raised);
  nb::object ours = nb::module_::import_("tilestone._errors").attr("CheckpointError");
  if (PyObject_IsInstance(value.ptr(), ours.ptr()) != 1) {
    return Error(ErrorCode::kInterrupted, what + " raised " + kept.what())
        .with_cause(std::make_exception_ptr(kept));
  }
  Error error(code_named(text_attribute(value, "code")), text_attribute(value, "message"));
  if (auto key = text_attribute(value, "key"); !key.empty()) error.with_key(key);
  if (auto file = text_attribute(value, "file"); !file.empty()) error.with_file(file);
  if (int rank = int_attribute(value, "rank", -1); rank >= 0) error.with_rank(rank);
  error.with_reason(reason_named(text_attribute(value, "reason"))).with_hint(hint_of(value));
  const int number = int_attribute(value, "errno", 0);
  // An errno that all errors of the Python class have is not passed on.
  if (number != int_attribute(value, "_usual_errno", 0)) error.with_errno(number);
  return error.with_cause(std::make_exception_ptr(kept));
}

void bind_errors(nb::module_&) { nb::register_exception_translator(translate); }

}  // namespace tilestone::python
