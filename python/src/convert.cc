// Conversions of checkpoints.
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "python/src/bindings.h"
#include "tilestone/engine/convert/rename_rules_internal.h"
#include "tilestone/engine/read/optimizer_layout_internal.h"

namespace tilestone::python {

using nb::literals::operator""_a;

namespace {

void bind_convert_options(nb::module_& m) {
  nb::class_<ConvertOptions>(m, "ConvertOptions", "How a checkpoint is converted.")
      .def(nb::init<>())
      .def_rw("format", &ConvertOptions::format)
      .def_rw("dialect", &ConvertOptions::dialect)
      .def_rw("keys", &ConvertOptions::keys)
      .def_rw("only", &ConvertOptions::only)
      .def_prop_rw(
          "cast",
          [](const ConvertOptions& options) {
            return options.cast ? std::string(to_string(*options.cast)) : std::string();
          },
          [](ConvertOptions& options, const std::string& name) {
            options.cast.reset();
            if (!name.empty()) options.cast = dtype_named(name);
          })
      .def_rw("optimizer", &ConvertOptions::optimizer)
      .def_rw("layout_file", &ConvertOptions::layout_file)
      .def_rw("shard_bytes", &ConvertOptions::shard_bytes)
      .def_rw("files", &ConvertOptions::files)
      .def_rw("other_file", &ConvertOptions::other_file)
      .def_rw("timeout", &ConvertOptions::timeout)
      .def_rw("dry_run", &ConvertOptions::dry_run)
      .def_rw("reading", &ConvertOptions::reading)
      .def_rw("resources", &ConvertOptions::resources);
}

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
  nb::class_<ConvertResult>(m, "ConvertResult", "What a conversion has copied.")
      .def_ro("format", &ConvertResult::format)
      .def_ro("dialect", &ConvertResult::dialect)
      .def_ro("keys", &ConvertResult::keys, "In the order of the new keys.")
      .def_ro("left_out", &ConvertResult::left_out,
              "Number of keys of the source that the options leave out.")
      .def_ro("has_common", &ConvertResult::has_common,
              "Whether Megatron-Core's common state was copied.")
      .def_ro("bytes", &ConvertResult::bytes, "Of the tensors, as written.")
      .def_ro("seconds", &ConvertResult::seconds)
      .def("__repr__", [](nb::handle self) {
        return shown(self, {"format", "dialect", "keys", "left_out", "bytes"});
      });
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
  m.def(
      "check_optimizer_layouts",
      [](const std::string& json) { engine::parse_optimizer_layouts(json); }, "json"_a);
  bind_convert_options(m);
  bind_result(m);
  m.def(
      "convert",
      [](const nb::bytes& source, const nb::bytes& target, ConvertOptions options,
         nb::handle rename, nb::handle progress, nb::handle comm) {
        const Location from = location_of(source, options.reading.follow_links);
        options.progress = to_progress(progress);
        if (!rename.is_none()) options.rename_by = renaming(rename);
        options.comm = to_communicator(comm);
        return without_gil([&](const Stop& stop) {
          options.interrupt = stop;
          return convert(from, Location(path_of(target)), options);
        });
      },
      "source"_a, "target"_a, "options"_a, "rename"_a.none(), "progress"_a.none(),
      "comm"_a.none() = nb::none());
}

}  // namespace tilestone::python
