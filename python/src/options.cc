// The options of saves and loads: the fields of the library's structs that Python sets.
#include <nanobind/stl/map.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "python/src/bindings.h"

namespace tilestone::python {
namespace {

using nb::literals::operator""_a;

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

const Words<CachePolicy>& cache_words() {
  static const Words<CachePolicy> words = {
      {"auto", CachePolicy::kAuto}, {"bypass", CachePolicy::kBypass}, {"keep", CachePolicy::kKeep}};
  return words;
}

const Words<LoadOptions::Policy>& policies() {
  using Policy = LoadOptions::Policy;
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

void bind_save_options(nb::module_& m) {
  nb::class_<SaveOptions> options(m, "SaveOptions", "How a save is made.");
  options.def(nb::init<>())
      .def_rw("overwrite", &SaveOptions::overwrite)
      .def_rw("validate_access", &SaveOptions::validate_access)
      .def_rw("timeout", &SaveOptions::timeout)
      .def_rw("threads", &SaveOptions::threads)
      .def_rw("buffer_bytes", &SaveOptions::buffer_bytes)
      .def_rw("files_per_rank", &SaveOptions::files_per_rank)
      .def_rw("attributes", &SaveOptions::attributes)
      .def_rw("by_files", &SaveOptions::by_files, nb::arg().none())
      .def_rw("replicate_group", &SaveOptions::replicate_group)
      .def_rw("max_copy_bytes", &SaveOptions::max_copy_bytes)
      .def_rw("tp_replica_names", &SaveOptions::tp_replica_names);
  bind_named(options, "format", &SaveOptions::format, &format_named);
  bind_named(options, "dialect", &SaveOptions::dialect, &save_dialect_named);
  using Agreement = SaveOptions::Agreement;
  bind_words(options, "agreement", &SaveOptions::agreement,
             {{"exchange", Agreement::kExchange}, {"rule", Agreement::kRule}});
  using Differing = SaveOptions::Differing;
  bind_words(
      options, "common_differs", &SaveOptions::common_differs,
      {{"ignore", Differing::kIgnore}, {"warn", Differing::kWarn}, {"error", Differing::kError}});
  using Replicate = SaveOptions::Replicate;
  bind_words(options, "replicate", &SaveOptions::replicate,
             {{"none", Replicate::kNone}, {"local", Replicate::kLocal}});
}

void bind_load_options(nb::module_& m) {
  nb::class_<LoadOptions> options(m, "LoadOptions", "How a load is made.");
  options.def(nb::init<>())
      .def_rw("own_rank", &LoadOptions::own_rank, nb::arg().none())
      .def_rw("cast", &LoadOptions::cast)
      .def_rw("verify_checksums", &LoadOptions::verify_checksums)
      .def_rw("sharded_only", &LoadOptions::sharded_only)
      .def_rw("validate_access", &LoadOptions::validate_access)
      .def_rw("objects_by_grid", &LoadOptions::objects_by_grid)
      .def_rw("log_report", &LoadOptions::log_report)
      .def_rw("timeout", &LoadOptions::timeout)
      .def_rw("threads", &LoadOptions::threads)
      .def_rw("buffer_bytes", &LoadOptions::buffer_bytes);
  bind_named(options, "unmarked", &LoadOptions::unmarked, &dialect_named);
  using TwoPhase = LoadOptions::TwoPhase;
  bind_words(
      options, "two_phase", &LoadOptions::two_phase,
      {{"auto", TwoPhase::kAuto}, {"always", TwoPhase::kAlways}, {"never", TwoPhase::kNever}});
  bind_words(options, "cache", &LoadOptions::cache, cache_words());
  bind_words(options, "not_in_checkpoint", &LoadOptions::not_in_checkpoint, policies());
  bind_words(options, "other_shape", &LoadOptions::other_shape, policies());
  options.def_prop_rw(
      "not_requested",
      [](const LoadOptions& given) -> std::optional<std::string> {
        if (!given.not_requested) return std::nullopt;
        return word_of(*given.not_requested, policies());
      },
      [](LoadOptions& given, const std::optional<std::string>& word) {
        given.not_requested.reset();
        if (word) given.not_requested = value_named("not_requested", *word, policies());
      },
      nb::arg().none());
}

}  // namespace

CachePolicy cache_named(const std::string& name) {
  return value_named("cache", name, cache_words());
}

void bind_options(nb::module_& m) {
  nb::class_<ByFiles>(m, "ByFiles", "A rank's part in a save without a communicator.")
      .def(nb::new_([](int rank, int world_size, std::string token, uint64_t number, bool wait,
                       bool torch_rank_local) {
             return ByFiles{rank, world_size, std::move(token), number, wait, torch_rank_local};
           }),
           "rank"_a, "world_size"_a, "token"_a, "number"_a, "wait"_a, "torch_rank_local"_a)
      .def_ro("rank", &ByFiles::rank)
      .def_ro("world_size", &ByFiles::world_size)
      .def_ro("number", &ByFiles::number);
  bind_save_options(m);
  bind_load_options(m);
  m.attr("DEFAULT_TIMEOUT") = kDefaultTimeout;
  m.attr("DEFAULT_BUFFER_BYTES") = static_cast<uint64_t>(BufferPool::kDefaultTotal);
}

}  // namespace tilestone::python
