// Converts Dims to a Python tuple of ints, and any sequence of ints to Dims; values of options'
// enums to words.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "tilestone/engine/run/option_fields_internal.h"
#include "tilestone/tilestone.h"

namespace tilestone::python {

// What PySequence_Fast_GET_SIZE and PySequence_Fast_GET_ITEM (a borrowed reference) return. These
// macros are not in the stable ABI.
inline Py_ssize_t fast_size(PyObject* fast) {
  return PyList_Check(fast) ? PyList_Size(fast) : PyTuple_Size(fast);
}
inline PyObject* fast_item(PyObject* fast, Py_ssize_t i) {
  return PyList_Check(fast) ? PyList_GetItem(fast, i) : PyTuple_GetItem(fast, i);
}

}  // namespace tilestone::python

namespace nanobind::detail {

template <>
struct type_caster<tilestone::Dims> {
  NB_TYPE_CASTER(tilestone::Dims, io_name("collections.abc.Sequence[int]", "tuple[int, ...]"))

  bool from_python(handle src, uint32_t, cleanup_list*) noexcept {
    if (!PySequence_Check(src.ptr()) || PyUnicode_Check(src.ptr()) || PyBytes_Check(src.ptr())) {
      return false;
    }
    object items = steal(PySequence_Fast(src.ptr(), ""));
    if (!items.is_valid()) return give_up();
    const Py_ssize_t count = tilestone::python::fast_size(items.ptr());
    value = tilestone::Dims();
    for (Py_ssize_t i = 0; i < count; ++i) {
      object index = steal(PyNumber_Index(tilestone::python::fast_item(items.ptr(), i)));
      if (!index.is_valid()) return give_up();
      const long long number = PyLong_AsLongLong(index.ptr());
      if (number == -1 && PyErr_Occurred()) return give_up();
      value.push_back(number);
    }
    return true;
  }

  static handle from_cpp(const tilestone::Dims& dims, rv_policy, cleanup_list*) noexcept {
    PyObject* out = PyTuple_New(static_cast<Py_ssize_t>(dims.size()));
    if (out == nullptr) return {};
    for (size_t i = 0; i < dims.size(); ++i) {
      PyTuple_SetItem(out, static_cast<Py_ssize_t>(i), PyLong_FromLongLong(dims[i]));
    }
    return out;
  }

 private:
  static bool give_up() noexcept {
    PyErr_Clear();
    return false;
  }
};

template <tilestone::HasWords Word>
struct type_caster<Word, enable_if_t<std::is_enum_v<Word>>> {
  NB_TYPE_CASTER(Word, const_name("str"))

  bool from_python(handle src, uint32_t, cleanup_list*) noexcept {
    int place = 0;
    for (const char* word : tilestone::WordsOf<Word>::words) {
      value = static_cast<Word>(place++);
      if (PyUnicode_Check(src.ptr()) && PyUnicode_CompareWithASCIIString(src.ptr(), word) == 0) {
        return true;
      }
    }
    return false;
  }

  static handle from_cpp(Word word, rv_policy, cleanup_list*) noexcept {
    return PyUnicode_FromString(tilestone::WordsOf<Word>::words[static_cast<int>(word)]);
  }
};

template <>
struct type_caster<tilestone::Best> {
  using Rule = std::tuple<std::string, tilestone::Best::Mode, size_t>;
  NB_TYPE_CASTER(tilestone::Best, const_name("tuple[str, str, int]"))

  bool from_python(handle src, uint32_t, cleanup_list*) noexcept {
    Rule rule;
    if (!try_cast(src, rule)) return false;
    value = {std::get<0>(rule), std::get<1>(rule), std::get<2>(rule)};
    return true;
  }

  static handle from_cpp(const tilestone::Best& best, rv_policy, cleanup_list*) noexcept {
    return cast(Rule(best.metric, best.mode, best.count)).release();
  }
};

}  // namespace nanobind::detail
