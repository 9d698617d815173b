// Conversions of checkpoints.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "python/src/bindings.h"
#include "python/src/report.h"
#include "tilestone/engine/convert/rename_rules_internal.h"

namespace tilestone::python {

using nb::literals::operator""_a;

namespace {

void bind_result(nb::module_& m) {
  nb::class_<ConvertedKey>(m, "ConvertedKey", "A tensor or object that a conversion copies.")
      .def_prop_ro("key", [](const ConvertedKey& key) { return python_text(key.to); })
      .def_prop_ro(
          "source_key", [](const ConvertedKey& key) { return python_text(key.from); },
          "Its key in the source.")
      .def_ro("is_object", &ConvertedKey::object)
      .def_prop_ro(
          "dtype", [](const ConvertedKey& key) { return std::string(to_string(key.dtype)); },
          "Of the new tensor.")
      .def_prop_ro("source_dtype",
                   [](const ConvertedKey& key) { return std::string(to_string(key.from_dtype)); })
      .def_prop_ro("shape",
                   [](const ConvertedKey& key) {
                     return std::vector<int64_t>(key.shape.begin(), key.shape.end());
                   })
      .def_ro("file", &ConvertedKey::file, "The safetensors file of the tensor; otherwise empty.")
      .def("__repr__", [](nb::handle self) { return shown(self, {"key", "source_key"}); });
  bind_report<ConvertResult>(m, "ConvertResult", "What a conversion has copied.",
                             {"format", "dialect", "keys", "left_out", "bytes"});
}

}  // namespace

std::function<std::string(const std::string&)> renaming(nb::handle function) {
  if (PyCallable_Check(function.ptr()) == 0) {
    std::vector<RenameRule> given;
    for (auto& [pattern, name] :
         nb::cast<std::vector<std::pair<std::string, std::string>>>(function)) {
      given.push_back({std::move(pattern), std::move(name)});
    }
    const auto rules = std::make_shared<const engine::RenameRules>(given);
    return [rules](const std::string& key) { return rules->apply(key); };
  }
  return [kept = keep_alive(function)](const std::string& key) {
    return with_gil("rename", [&] {
      const nb::object renamed = kept_object(kept)(python_text(key));
      if (!nb::isinstance<nb::str>(renamed)) {
        throw Error(ErrorCode::kInvalidArgument,
                    std::string("rename must return the new key, or \"\" to leave it out, not ") +
                        nb::repr(renamed).c_str())
            .with_key(key);
      }
      return nb::cast<std::string>(renamed);
    });
  };
}

void bind_convert(nb::module_& m) {
  bind_result(m);
  m.def(
      "convert",
      [](const nb::bytes& source, const nb::bytes& target, ConvertOptions options,
         nb::handle progress, nb::handle comm) {
        const Location from = location_of(source, options.reading.follow_links);
        options.progress = to_progress(progress);
        options.comm = to_communicator(comm);
        return without_gil([&](const Stop& stop) {
          options.interrupt = stop;
          return convert(from, Location(path_of(target)), options);
        });
      },
      "source"_a, "target"_a, "options"_a, "progress"_a.none(), "comm"_a.none() = nb::none());
}

}  // namespace tilestone::python
