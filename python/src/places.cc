// What stands at a place, beside what a checkpoint's format says of it.
#include <nanobind/stl/unique_ptr.h>

#include <filesystem>
#include <memory>

#include "python/src/bindings.h"
#include "tilestone/base/uuid.h"
#include "tilestone/engine/commit/sibling_internal.h"
#include "tilestone/engine/delta/delta_file_internal.h"
#include "tilestone/engine/fast_tier/host_folder_internal.h"
#include "tilestone/engine/open/detect_internal.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/engine/training_run/hints_internal.h"
#include "tilestone/format/known/known.h"
#include "tilestone/format/safetensors/safetensors.h"
#include "tilestone/format/torch_dist/torch_dist.h"
#include "tilestone/storage/object_store.h"
#include "tilestone/storage/storage.h"

namespace tilestone::python {
namespace {

using nb::literals::operator""_a;

nb::list names_at(const nb::bytes& path) {
  const Location location = location_of(path, true);
  const Listing found = without_gil([&] { return location.storage().listing("", Depth::kLevel); });
  nb::list names;
  for (const auto* each : {&found.files, &found.directories}) {
    for (const std::string& name : *each) names.append(python_text(name));
  }
  names.attr("sort")();
  return names;
}

// None if there is no such file.
nb::object bytes_at(const nb::bytes& path, const std::string& name, uint64_t offset,
                    std::optional<uint64_t> size) {
  const Location location = location_of(path, true);
  const std::optional<Bytes> found = without_gil([&]() -> std::optional<Bytes> {
    try {
      const auto file = location.storage().open(name);
      if (offset > file->size()) return Bytes();
      Bytes bytes(std::min(size.value_or(UINT64_MAX), file->size() - offset));
      const ReadOp op{file.get(), offset, bytes.size(), bytes.data()};
      if (!bytes.empty()) location.storage().read({&op, 1}, {}, [](size_t, ByteView) {});
      return bytes;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kNotFound) throw;
      return std::nullopt;
    }
  });
  return found ? nb::object(python_bytes(*found)) : nb::none();
}

void put_file(const nb::bytes& path, const std::string& name, const nb::bytes& content) {
  const Location location = location_of(path, false);
  const size_t folder = name.rfind('/') + 1;  // 0: none
  const std::string scratch = name.substr(0, folder) + ".tilestone-" + random_uuid();
  const ByteView bytes = byte_view(content);
  without_gil([&] {
    location.storage().publish(name, scratch, bytes, /*replace=*/true, Deadline::never());
  });
}

void remove_file(const nb::bytes& path, const std::string& name) {
  const Location location = location_of(path, false);
  without_gil([&] {
    location.storage().remove(name);
    location.storage().settle("");
  });
}

// What stands at a place, but a folder of a model, and the file that shows it; "": nothing else.
std::pair<std::string, std::string> other_than_model(const nb::bytes& path) {
  const Location location = location_of(path, true);
  return without_gil([&]() -> std::pair<std::string, std::string> {
    const engine::Standing here = engine::look_at(location.storage(), torch_dist_format());
    if (here.is_removed) return {"a checkpoint that is being removed", ""};
    if (!here.notes.attempts.empty()) return {"a save that is not published", ""};
    for (const std::string& name : here.names) {
      if (name == engine::kDeltaName) return {"a delta", name};
      if (name.starts_with(engine::kHints)) return {"a run", name};
      if (name.ends_with("/" + std::string(engine::kKeptName))) return {"steps of a run", name};
    }
    const auto model = safetensors_format();
    if (here.foreign && !model->detect({&here.foreign->mark, 1})) {
      return {here.foreign->kind, here.foreign->mark};
    }
    for (const auto& format : readable_formats()) {
      if (!format->detect(here.of_checkpoint)) continue;
      if (format->name() == model->name()) break;
      return {"a checkpoint in the format " + std::string(format->name()), ""};
    }
    return {};
  });
}

void bind_sibling(nb::module_& m) {
  using engine::NewSibling;
  nb::class_<NewSibling>(
      m, "NewSibling", "The directory beside a place in which a folder is made that then takes it.")
      .def(nb::new_([](const nb::bytes& path, const std::string& save_id) {
             const Location location(path_of(path));
             return std::make_unique<NewSibling>(location.shared(), save_id);
           }),
           "path"_a, "save_id"_a)
      .def("begin", [](NewSibling& sibling) { without_gil([&] { sibling.begin(); }); })
      .def(
          "publish",
          [](NewSibling& sibling, const std::string& made) {
            without_gil([&] { sibling.publish_over(made); });
          },
          "made"_a, "Moves a folder of the directory, which is durable, to the place.")
      .def("abandon", [](NewSibling& sibling) {
        without_gil([&] { sibling.abandon(); }, WithoutGil::kShort);
      });
  m.def(
      "clean_beside",
      [](const nb::bytes& path) {
        const Location location(path_of(path));
        without_gil([&] { engine::clean_siblings(location.storage()); });
      },
      "path"_a, "Removes what dead processes have left beside a place.");
}

// certifi's certificates serve on a system that has none.
void find_certificates() {
  try {
    const nb::object spec = nb::module_::import_("importlib.util").attr("find_spec")("certifi");
    if (spec.is_none() || spec.attr("origin").is_none()) return;
    const std::filesystem::path module_file = nb::cast<std::string>(spec.attr("origin"));
    set_spare_certificates(module_file.parent_path() / "cacert.pem");
  } catch (const nb::python_error&) {
    // A module that somebody has put into sys.modules under that name, without a specification.
  }
}

}  // namespace

void bind_places(nb::module_& m) {
  find_certificates();
  bind_sibling(m);
  m.def(
      "refuse_url", [](const nb::bytes& path) { engine::refuse_url(path_of(path)); }, "path"_a,
      "Raises UnsupportedError if the path is a URL, as it was written or as pathlib shortens it.");
  m.def(
      "identity_of",
      [](const nb::bytes& path) {
        return python_text(Location(path_of(path)).resolved_identity());
      },
      "path"_a, "The text that is the same for each path that leads to a place.");
  m.def(
      "is_url", [](const nb::bytes& path) { return engine::is_url(path_of(path)); }, "path"_a,
      "Whether a path is a URL, as it was written or as pathlib shortens it.");
  m.def(
      "object_store_problem", [] { return without_gil([] { return object_store_problem(); }); },
      "Why no object store can be used here: no S3, or no credentials. Empty if one can.");
  m.def("other_than_model", &other_than_model, "path"_a,
        nb::sig("def other_than_model(path: bytes) -> tuple[str, str]"),
        "What stands at a place, but a folder of a model, and the file that shows it; "
        "\"\": nothing else.");
  m.def("names_at", &names_at, "path"_a, nb::sig("def names_at(path: bytes) -> list[str]"),
        "The names of files and directories directly at a place, sorted.");
  m.def("bytes_at", &bytes_at, "path"_a, "name"_a, "offset"_a = 0, "size"_a.none() = nb::none(),
        nb::sig("def bytes_at(path: bytes, name: str, offset: int = 0, size: int | None = None) "
                "-> bytes | None"),
        "The bytes of a file at a place; None if there is no such file.");
  m.def("put_file", &put_file, "path"_a, "name"_a, "content"_a,
        "Makes a file, or replaces it, in one step and durably.");
  m.def("remove_file", &remove_file, "path"_a, "name"_a,
        "Removes a file durably; does nothing if there is none.");
}

}  // namespace tilestone::python
