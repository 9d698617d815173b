// The options of saves and loads: the fields of the library's structs that Python sets.
#include <nanobind/stl/map.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "python/src/bindings.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/format.h"

namespace tilestone::python {
namespace {

template <typename Value>
using Words = std::vector<std::pair<const char*, Value>>;

template <typename Value>
std::string word_of(Value value, const Words<Value>& words) {
  for (const auto& [word, each] : words) {
    if (each == value) return word;
  }
  return "";
}

// A field that is a word in Python. Setting an unknown word is Error(kInvalidArgument).
template <typename Options, typename Value>
void bind_words(nb::class_<Options>& options, const char* name, Value Options::* field,
                const Words<Value>& words) {
  options.def_prop_rw(
      name, [=](const Options& given) { return word_of(given.*field, words); },
      [=](Options& given, const std::string& word) {
        given.*field = value_named(name, word, words);
      });
}

// The same for a field that is None unless it is set.
template <typename Options, typename Value>
void bind_words(nb::class_<Options>& options, const char* name,
                std::optional<Value> Options::* field, const Words<Value>& words) {
  using Word = std::optional<std::string>;
  options.def_prop_rw(
      name,
      [=](const Options& given) {
        const auto& value = given.*field;
        return value ? Word(word_of(*value, words)) : Word();
      },
      [=](Options& given, const Word& word) {
        (given.*field).reset();
        if (word) given.*field = value_named(name, *word, words);
      },
      nb::arg().none());
}

const Words<Differences::Policy>& policies() {
  using Policy = Differences::Policy;
  static const Words<Policy> words = {
      {"error", Policy::kError}, {"report", Policy::kReport}, {"ignore", Policy::kIgnore}};
  return words;
}

// A format or dialect by its name; "" is the default.
template <typename Options, typename Named>
void bind_named(nb::class_<Options>& options, const char* name,
                std::shared_ptr<const Named> Options::* field,
                std::shared_ptr<const Named> (*find)(std::string_view)) {
  options.def_prop_rw(
      name,
      [=](const Options& given) {
        const auto& named = given.*field;
        return named == nullptr ? std::string() : std::string(named->name());
      },
      [=](Options& given, const std::string& word) { given.*field = find(word); });
}

// The structs of python/tilestone/_options/values.py, with the same names and fields. Python makes
// one with defaults and sets its fields.
void bind_values(nb::module_& m) {
  nb::class_<ByFiles>(m, "ByFiles", "A rank's part in a save without a communicator.")
      .def(nb::init<>())
      .def_rw("rank", &ByFiles::rank)
      .def_rw("world_size", &ByFiles::world_size)
      .def_rw("token", &ByFiles::token)
      .def_rw("number", &ByFiles::number)
      .def_rw("wait", &ByFiles::wait)
      .def_rw("torch_rank_local", &ByFiles::torch_rank_local);
  nb::class_<LocalCopies>(m, "LocalCopies", "Whose shards a rank copies, and how many bytes.")
      .def(nb::init<>())
      .def_rw("group", &LocalCopies::group)
      .def_rw("max_bytes", &LocalCopies::max_bytes, nb::arg().none());
  nb::class_<Checks> checks(m, "Checks", "What a save, a load or an open checkpoint checks.");
  checks.def(nb::init<>())
      .def_rw("access", &Checks::access)
      .def_rw("checksums", &Checks::checksums);
  using Differing = Checks::Differing;
  bind_words(
      checks, "common_differs", &Checks::common_differs,
      {{"ignore", Differing::kIgnore}, {"warn", Differing::kWarn}, {"error", Differing::kError}});
  nb::class_<Differences> differences(m, "Differences",
                                      "What a load does about differences to the checkpoint.");
  differences.def(nb::init<>());
  bind_words(differences, "not_in_checkpoint", &Differences::not_in_checkpoint, policies());
  bind_words(differences, "other_shape", &Differences::other_shape, policies());
  bind_words(differences, "not_requested", &Differences::not_requested, policies());
  nb::class_<Reading> reading(m, "Reading", "How a checkpoint's files are read.");
  reading.def(nb::init<>()).def_rw("follow_links", &Reading::follow_links);
  using TwoPhase = Reading::TwoPhase;
  bind_words(
      reading, "two_phase", &Reading::two_phase,
      {{"auto", TwoPhase::kAuto}, {"always", TwoPhase::kAlways}, {"never", TwoPhase::kNever}});
  bind_words(reading, "cache", &Reading::cache,
             Words<CachePolicy>{{"bypass", CachePolicy::kBypass}, {"keep", CachePolicy::kKeep}});
  nb::class_<Resources>(m, "Resources", "What a call uses of the machine.")
      .def(nb::init<>())
      .def_rw("threads", &Resources::threads)
      .def_rw("buffer_bytes", &Resources::buffer_bytes)
      .def_rw("files_per_rank", &Resources::files_per_rank);
}

void bind_save_options(nb::module_& m) {
  nb::class_<RunStep>(m, "RunStep", "What a CheckpointManager adds to a save.");
  nb::class_<SaveOptions> options(m, "SaveOptions", "How a save is made.");
  options.def(nb::init<>())
      .def_rw("overwrite", &SaveOptions::overwrite)
      .def_rw("by_files", &SaveOptions::by_files, nb::arg().none())
      .def_rw("checks", &SaveOptions::checks)
      .def_rw("copies", &SaveOptions::copies, nb::arg().none())
      .def_rw("resources", &SaveOptions::resources)
      .def_rw("timeout", &SaveOptions::timeout)
      .def_rw("attributes", &SaveOptions::attributes)
      .def_rw("tp_replica_names", &SaveOptions::tp_replica_names)
      .def_rw("separation_hint", &SaveOptions::separation_hint)
      .def_rw("verify_integrity", &SaveOptions::verify_integrity)
      .def_rw("step", &SaveOptions::step, nb::arg().none());
  bind_named(options, "format", &SaveOptions::format, &format_named);
  bind_named(options, "dialect", &SaveOptions::dialect, &save_dialect_named);
}

// The fields that loads and open checkpoints have in common.
template <typename Options>
void bind_reading(nb::class_<Options>& options) {
  options.def(nb::init<>())
      .def_rw("checks", &Options::checks)
      .def_rw("reading", &Options::reading)
      .def_rw("resources", &Options::resources);
  bind_named(options, "format", &Options::format, &format_named);
  bind_named(options, "unmarked", &Options::unmarked, &dialect_named);
}

void bind_load_options(nb::module_& m) {
  nb::class_<LoadOptions> options(m, "LoadOptions", "How a load is made.");
  bind_reading(options);
  options.def_rw("own_rank", &LoadOptions::own_rank, nb::arg().none())
      .def_rw("cast", &LoadOptions::cast)
      .def_prop_rw(
          "rename", [](const LoadOptions& given) { return given.rename != nullptr; },
          [](LoadOptions& given, nb::handle function) {
            given.rename = nullptr;
            if (!function.is_none()) given.rename = renaming(function);
          },
          nb::arg().none())
      .def_rw("differences", &LoadOptions::differences)
      .def_rw("sharded_only", &LoadOptions::sharded_only)
      .def_rw("objects_by_grid", &LoadOptions::objects_by_grid)
      .def_rw("log_report", &LoadOptions::log_report)
      .def_rw("fill_empty", &LoadOptions::fill_empty)
      .def_rw("timeout", &LoadOptions::timeout);
  nb::class_<OpenOptions> open(m, "OpenOptions", "How a checkpoint is opened.");
  bind_reading(open);
}

}  // namespace

void bind_options(nb::module_& m) {
  bind_values(m);
  bind_save_options(m);
  bind_load_options(m);
  m.attr("DEFAULT_TIMEOUT") = kDefaultTimeout;
  m.attr("DEFAULT_BUFFER_BYTES") = kDefaultBufferBytes;
}

}  // namespace tilestone::python
