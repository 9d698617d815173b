// The options of saves and loads: the fields of the library's structs that Python sets.
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "python/src/bindings.h"
#include "python/src/reports.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/format.h"
#include "tilestone/format/safetensors/safetensors.h"

namespace tilestone::python {
namespace {

using nb::literals::operator""_a;

// Whether a field is no option of Python's, or is set by the call that has the options.
template <typename Field>
constexpr bool is_set_elsewhere() {
  return std::is_same_v<Field, Communicator> || std::is_same_v<Field, ProgressFn> ||
         std::is_same_v<Field, std::shared_ptr<const Interrupt>> ||
         std::is_same_v<Field, LoadReport*> || std::is_same_v<Field, std::vector<Path>> ||
         std::is_same_v<Field, std::vector<RenameRule>> ||
         std::is_same_v<Field, std::map<std::string, Attributes>>;
}

template <typename Options, typename Field>
void bind_field(nb::class_<Options>& bound, const char* name, Field Options::* field) {
  bound.def_rw(name, field);
}
template <typename Options, typename Field>
void bind_field(nb::class_<Options>& bound, const char* name,
                std::optional<Field> Options::* field) {
  bound.def_rw(name, field, nb::arg().none());
}
template <typename Options>
void bind_field(nb::class_<Options>& bound, const char* name,
                std::shared_ptr<RunStep> Options::* field) {
  bound.def_rw(name, field, nb::arg().none());
}

// A path of a checkpoint.
template <typename Options>
void bind_field(nb::class_<Options>& bound, const char* name,
                std::optional<Location> Options::* field) {
  bound.def_prop_rw(
      name,
      [=](const Options& given) {
        const auto& location = given.*field;
        return location ? std::optional(python_text(location->describe())) : std::nullopt;
      },
      [=](Options& given, const std::optional<nb::bytes>& path) {
        given.*field = std::nullopt;
        if (path) given.*field = Location(path_of(*path));
      },
      nb::arg().none());
}

// A format or dialect by its name; "" is the default.
template <typename Options, typename Named>
void bind_field(nb::class_<Options>& bound, const char* name,
                std::shared_ptr<const Named> Options::* field) {
  bound.def_prop_rw(
      name,
      [=](const Options& given) {
        const auto& named = given.*field;
        return named == nullptr ? std::string() : std::string(named->name());
      },
      [=](Options& given, const std::string& word) {
        if constexpr (std::is_same_v<Named, Format>) {
          given.*field = format_named(word);
        } else {
          constexpr bool saves = std::is_same_v<Options, SaveOptions>;
          given.*field = saves ? save_dialect_named(word) : dialect_named(word);
        }
      });
}

template <typename Options>
void bind_field(nb::class_<Options>& bound, const char* name,
                std::function<std::string(const std::string&)> Options::* field) {
  bound.def_prop_rw(
      name, [=](const Options& given) { return given.*field != nullptr; },
      [=](Options& given, nb::handle function) {
        given.*field = nullptr;
        if (!function.is_none()) given.*field = renaming(function);
      },
      nb::arg().none());
}

// A dtype by its name; "" is none.
template <typename Options>
void bind_field(nb::class_<Options>& bound, const char* name,
                std::optional<DType> Options::* field) {
  bound.def_prop_rw(
      name,
      [=](const Options& given) {
        const auto& dtype = given.*field;
        return dtype ? std::string(to_string(*dtype)) : std::string();
      },
      [=](Options& given, const std::string& word) {
        given.*field = word.empty() ? std::nullopt : std::optional(dtype_named(word));
      });
}

// Python makes one with defaults and sets its fields.
template <typename Options, typename Fields = FieldsOf<Options>>
nb::class_<Options> bind_struct(nb::module_& m, const char* name) {
  nb::class_<Options> bound(m, name);
  bound.def(nb::init<>());
  Fields::each([&](const char* field_name, auto field, auto) {
    using Field = std::remove_cvref_t<decltype(std::declval<Options>().*field)>;
    if constexpr (!is_set_elsewhere<Field>()) bind_field(bound, field_name, field);
  });
  return bound;
}

// The file of each key and of all others; where each key's elements begin in the whole tensor, and
// the shape of that.
void write_safetensors(
    SaveOptions& options, const std::map<std::string, std::string>& files,
    const std::string& other_file,
    const std::map<std::string, std::pair<std::vector<int64_t>, std::vector<int64_t>>>& pieces) {
  SafetensorsPlan plan{.files = {files.begin(), files.end()}, .other_file = other_file};
  for (const auto& [key, piece] : pieces) {
    plan.pieces[key] = {Dims(std::span<const int64_t>(piece.first)),
                        Dims(std::span<const int64_t>(piece.second))};
  }
  options.format = safetensors_writer(std::move(plan));
}

}  // namespace

void bind_options(nb::module_& m) {
  bind_struct<ByFiles>(m, "ByFiles");
  bind_struct<LocalCopies>(m, "LocalCopies");
  bind_struct<Checks>(m, "Checks");
  bind_struct<Differences>(m, "Differences");
  bind_struct<Reading>(m, "Reading");
  bind_struct<Resources>(m, "Resources");
  bind_struct<Keep>(m, "Keep");
  nb::class_<RunStep>(m, "RunStep", "What a CheckpointManager adds to a save.");
  bind_struct<SaveOptions>(m, "SaveOptions")
      .def("write_safetensors", &write_safetensors, "files"_a, "other_file"_a, "pieces"_a);
  bind_struct<LoadOptions>(m, "LoadOptions");
  bind_struct<OpenOptions>(m, "OpenOptions");
  bind_struct<AsyncOptions>(m, "AsyncOptions");
  bind_struct<ConvertOptions, ReportFields<ConvertOptions>>(m, "ConvertOptions");
  m.def(
      "check_options", [](const SaveOptions& options) { engine::check_options(options); },
      "options"_a, "Raises what a save with them raises.");
  m.attr("DEFAULT_TIMEOUT") = kDefaultTimeout;
}

}  // namespace tilestone::python
