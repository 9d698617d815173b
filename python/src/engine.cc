// The functions save and load.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/unordered_set.h>

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "python/src/bindings.h"
#include "python/src/report.h"
#include "python/src/requests.h"
#include "python/src/writable.h"
#include "tilestone/engine/load/load_internal.h"
#include "tilestone/engine/save/save_steps_internal.h"
#include "tilestone/engine/session_internal.h"

namespace tilestone::python {
namespace {

using nb::literals::operator""_a;

// Attributes by key and name, from plain Python objects that _options.by_key() has checked.
std::map<std::string, Attributes> tensor_attributes_of(const nb::dict& given,
                                                       const Bridge& bridge) {
  std::map<std::string, Attributes> found;
  for (const auto [key, named] : given) {
    const auto text = nb::cast<std::string>(key);
    for (const auto [name, value] : nb::cast<nb::dict>(named)) {
      found[text][nb::cast<std::string>(name)] = to_value(value, bridge, {text});
    }
  }
  return found;
}

// `options` has the fields that need no Python object.
engine::SaveRequest make_save(
    nb::handle state, const nb::bytes& path, nb::handle bridge_object, const SaveOptions& options,
    const nb::typed<nb::dict, nb::str, nb::typed<nb::dict, nb::str, nb::object>>& tensor_attributes,
    nb::handle progress, nb::handle compared_common) {
  const Bridge bridge(bridge_object);
  engine::SaveRequest request{to_state(state, bridge), path_of(path), options, {}};
  if (!compared_common.is_none()) request.compared_common = to_state(compared_common, bridge);
  request.options.tensor_attributes = tensor_attributes_of(tensor_attributes, bridge);
  request.options.progress = to_progress(progress);
  return request;
}

// `optimizer`: the fields of an OptimizerRequest, or nothing.
BridgedLoad make_load(nb::handle wanted, const nb::bytes& path, nb::handle bridge_object,
                      const LoadOptions& options, nb::handle progress,
                      const std::vector<std::string>& optimizer) {
  const Bridge bridge(bridge_object);
  Claims claims;
  BridgedLoad load{std::nullopt, path_of(path), options, bridge};
  if (!wanted.is_none()) {
    load.wanted = to_state(wanted, bridge, &claims);
    load.original = keep_alive(wanted);
    check_writable(*load.wanted);
  }
  load.options.complete = std::move(claims.complete);
  load.options.subtrees = std::move(claims.subtrees);
  load.options.unmade = std::move(claims.unmade);
  load.options.kept_empty = std::move(claims.kept_empty);
  load.options.progress = to_progress(progress);
  if (!optimizer.empty()) {
    load.optimizer = {optimizer.at(0), optimizer.at(1), optimizer.at(2), optimizer.at(3)};
  }
  return load;
}

}  // namespace

Timings dict_of(const std::vector<StepTime>& timings) {
  nb::dict made;
  for (const StepTime& step : timings) made[nb::str(step.step.c_str())] = step.seconds;
  return nb::borrow<Timings>(made);
}

Deadline end_after(double seconds) {
  return Deadline::after(std::chrono::duration<double>(seconds));
}

void say_rank(const Raised& raised, int rank, int ranks) {
  const nb::object exception = raised.exception();
  if (ranks > 1 && nb::hasattr(exception, "add_rank")) exception.attr("add_rank")(rank);
}

void say_published(const Raised& raised, const std::optional<SaveResult>& result,
                   const Location& location) {
  if (!result || !result->published) return;
  raised.add_note("this came too late to stop the save: " + location.describe() + " was published");
}

engine::MadeRequest view_of(const MadeSave& made) {
  if (const Error* const failed = failure_of(made)) return *failed;
  return engine::view_of(std::get<engine::SaveRequest>(made));
}

bool ends_the_program(const Error& error) {
  if (error.cause() == nullptr) return false;
  try {
    std::rethrow_exception(error.cause());
  } catch (const Raised& raised) {
    return raised.ends_the_program();
  } catch (...) {
    return false;
  }
}

Deadline until(Deadline deadline, const Error* failed) {
  constexpr std::chrono::seconds kBrief{5};
  if (failed == nullptr || !ends_the_program(*failed)) return deadline;
  const Deadline brief = Deadline::after(kBrief);
  return brief.when() < deadline.when() ? brief : deadline;
}

SaveStart start_of(const MakesSave& prepare, const nb::bytes& path, nb::handle comm, double seconds,
                   const engine::SaveRequest* bare) {
  Location location(path_of(path));
  const Deadline deadline = end_after(seconds);
  Session* const session = session_of(comm);
  SaveOptions options;
  int rank = 0, ranks = 1;
  if (bare != nullptr) {
    options = bare->options;
    std::tie(rank, ranks) = std::pair(options.by_files->rank, options.by_files->world_size);
  } else if (session == nullptr) {
    options.comm = to_communicator(comm);
    std::tie(rank, ranks) = std::pair(options.comm.rank(), options.comm.size());
  }
  if (session != nullptr) std::tie(rank, ranks) = std::pair(session->rank(), session->world_size());
  MadeSave made = made_by(prepare);
  const Deadline end = options.by_files ? deadline : until(deadline, failure_of(made));
  return {std::move(location), std::move(options), session, rank, ranks, end, std::move(made)};
}

namespace {

// `prepare` returns a request; an exception of it is this rank's first message to the others.
// `path`: the location, empty if the path is invalid, which `prepare` reports.
SaveResult save_state(const MakesSave& prepare, const nb::bytes& path, nb::handle comm,
                      double seconds, const engine::SaveRequest* bare) {
  const Entered entered;
  const SaveStart start = start_of(prepare, path, comm, seconds, bare);
  std::optional<SaveResult> result;
  try {
    without_gil([&](const Stop& stop) {
      const Deadline end = start.deadline.with_interrupt(stop);
      const engine::MadeRequest request = view_of(start.made);
      result =
          start.session != nullptr
              ? engine::OfSession::save(*start.session, start.location, start.options, end, request)
              : engine::save_in_a_row({start.location, start.options, end}, request);
    });
  } catch (const Raised& raised) {
    say_rank(raised, start.rank, start.ranks);
    say_published(raised, result, start.location);
    throw;
  }
  return *std::move(result);
}

// engine::difference_from_saved() with the checkpoint at `path`.
std::string difference_from_saved(const MakesSave& prepare, const nb::bytes& path,
                                  nb::handle session, double seconds) {
  const Entered entered;
  const SaveStart start = start_of(prepare, path, session, seconds, nullptr);
  return as_rank(start.rank, start.ranks, [&] {
    return without_gil([&](const Stop& stop) {
      return engine::OfSession::difference(*start.session, start.location, {},
                                           start.deadline.with_interrupt(stop),
                                           view_of(start.made));
    });
  });
}

// Gives Python what was loaded; returns why it could not take it.
std::optional<Error> give(const nb::callable& take, const BridgedLoad& asked,
                          const engine::LoadResult& loaded) {
  try {
    with_gil("taking what was loaded", [&] {
      const LoadReport& report = loaded.report;
      const nb::object original =
          asked.original ? nb::borrow(kept_object(asked.original)) : nb::object(nb::none());
      take(from_state(loaded.state, original, asked.bridge, loaded.kept), report.not_in_checkpoint,
           report.not_requested, report.other_shape, loaded.kept.keys);
    });
    return std::nullopt;
  } catch (...) {
    return current_error();
  }
}

engine::MadeLoad load_of(const std::variant<BridgedLoad, Error>& made) {
  if (const auto* failed = std::get_if<Error>(&made)) return *failed;
  const auto& asked = std::get<BridgedLoad>(made);
  return engine::LoadView{asked.wanted ? &*asked.wanted : nullptr, &asked.location, &asked.options,
                          asked.preparing, asked.optimizer ? &*asked.optimizer : nullptr};
}

// Runs a part of a load, which ends if the part fails.
template <typename Work>
void run_part(std::optional<engine::LoadByRounds>& load,
              const std::shared_ptr<Interrupt>& interrupt, const Work& work) {
  call_library(
      [&](const Stop&) {
        try {
          work();
        } catch (...) {
          load.reset();
          rethrow_cause();
        }
      },
      interrupt);
}

// If the ranks can't meet, what this rank had `failed` with before says more.
void begin_load(std::optional<engine::LoadByRounds>& load, const Communicator& comm,
                const std::string& location, const Deadline& deadline, const Error* failed) {
  try {
    load.emplace(comm, location, deadline);
  } catch (...) {
    if (failed != nullptr) throw *failed;
    throw;
  }
}

// `prepare` returns a request; an exception of it is this rank's first message to the others.
// `take` gets the loaded dict, the three lists of the report, and the keys of this rank's items
// that were not loaded. An exception of it is this rank's failure of the last round. Returns the
// bytes that this rank has loaded, and its timings.
std::pair<uint64_t, Timings> load_state(const nb::callable& prepare, const nb::callable& take,
                                        const nb::bytes& path, nb::handle comm, double seconds) {
  const Entered entered;
  const Communicator communicator = to_communicator(comm);
  const Deadline deadline = end_after(seconds);
  const std::string location = Location(path_of(path)).identity_or_empty();
  const auto made = made_load(prepare);
  const Error* const failed = std::get_if<Error>(&made);
  const engine::MadeLoad request = load_of(made);
  const auto interrupt = std::make_shared<Interrupt>();  // of both parts
  const Deadline end = until(deadline, failed).with_interrupt(interrupt);
  std::vector<StepTime> timings;
  uint64_t bytes = 0;
  as_rank(communicator.rank(), communicator.size(), [&] {
    std::optional<engine::LoadByRounds> load;
    std::optional<engine::LoadResult> loaded;
    try {
      run_part(load, interrupt, [&] {
        begin_load(load, communicator, location, end, failed);
        loaded = load->read(request, false);
      });
    } catch (...) {
      if (load) without_gil([&] { load.reset(); });  // Python raised after the load had read
      throw;
    }
    const std::optional<Error> untaken = give(take, std::get<BridgedLoad>(made), *loaded);
    if (untaken && ends_the_program(*untaken)) interrupt->request(untaken->cause());
    run_part(load, interrupt, [&] {
      load->finish(untaken);
      timings = load->timings();
      bytes = loaded->report.bytes_loaded;
      load.reset();
    });
  });
  return {bytes, dict_of(timings)};
}

}  // namespace

ProgressFn to_progress(nb::handle callback) {
  if (callback.is_none()) return nullptr;
  return [kept = keep_alive(callback)](const Progress& progress) {
    const std::function<bool()> stopped = ends_early();
    with_gil("the progress function", [&] {
      if (stopped()) return;  // the user does not wait for another call of it
      kept_object(kept)(progress.phase, progress.bytes_done, progress.bytes_total,
                        progress.seconds);
    });
  };
}

// A SaveResult is pickled as the list of its fields: ranks send theirs to one another.
using Fields = nb::typed<nb::list, nb::object>;

Fields fields_of(nb::handle result) {
  nb::list fields;
  ReportFields<SaveResult>::each(
      [&](const char* name, auto, const char*) { fields.append(result.attr(name)); });
  return nb::borrow<Fields>(fields);
}

SaveResult result_of(const Fields& fields) {
  SaveResult result;
  size_t at = 0;
  ReportFields<SaveResult>::each([&](const char*, auto member, const char*) {
    const nb::object value = fields[at++];
    using Field = std::remove_cvref_t<decltype(result.*member)>;
    if constexpr (std::is_same_v<Field, std::vector<StepTime>>) {
      for (const auto [step, seconds] : nb::cast<nb::dict>(value)) {
        result.timings.push_back({nb::cast<std::string>(step), nb::cast<double>(seconds)});
      }
    } else {
      result.*member = nb::cast<Field>(value);
    }
  });
  return result;
}

void bind_engine(nb::module_& m) {
  bind_report<SaveResult>(m, "SaveResult", "What a save did.",
                          {"save_id", "bytes_written", "items_written", "timings", "published"})
      .def("__getstate__", &fields_of)
      .def("__setstate__", [](SaveResult& result, const Fields& fields) {
        new (&result) SaveResult(result_of(fields));
      });
  nb::class_<engine::SaveRequest>(m, "SaveRequest", "A rank's state, path and options for a save.")
      .def(nb::new_(&make_save), "state"_a, "path"_a, "bridge"_a, "options"_a, nb::kw_only(),
           "tensor_attributes"_a, "progress"_a.none(), "compared_common"_a.none());
  nb::class_<BridgedLoad>(m, "LoadRequest", "A rank's template, path and options for a load.")
      .def(nb::new_(&make_load), "wanted"_a.none(), "path"_a, "bridge"_a, "options"_a,
           nb::kw_only(), "progress"_a.none(), "optimizer"_a);
  m.def("save", &save_state, "prepare"_a, "path"_a, "comm"_a.none(), "seconds"_a, "bare"_a.none());
  m.def("difference_from_saved", &difference_from_saved, "prepare"_a, "path"_a, "session"_a,
        "seconds"_a);
  m.def("load", &load_state, "prepare"_a, "take"_a, "path"_a, "comm"_a.none(), "seconds"_a,
        nb::sig("def load(prepare: collections.abc.Callable[[], LoadRequest], take: "
                "collections.abc.Callable[[dict[object, object], list[str], list[str], list[str], "
                "set[str]], object], path: bytes, comm: "
                "object, seconds: float) -> tuple[int, dict[str, float]]"));
}

}  // namespace tilestone::python
