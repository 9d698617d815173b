// save and load.
#include "python/src/bindings.h"

namespace tilestone::python {
namespace {

using nb::literals::operator""_a;

SaveOptions::Agreement agreement_named(const std::string& name) {
  if (name == "exchange") return SaveOptions::Agreement::kExchange;
  if (name == "rule") return SaveOptions::Agreement::kRule;
  throw Error(ErrorCode::kInvalidArgument,
              "agreement is \"exchange\" or \"rule\", not \"" + name + "\"");
}

LoadOptions::TwoPhase two_phase_named(const std::string& name) {
  if (name == "auto") return LoadOptions::TwoPhase::kAuto;
  if (name == "always") return LoadOptions::TwoPhase::kAlways;
  if (name == "never") return LoadOptions::TwoPhase::kNever;
  throw Error(ErrorCode::kInvalidArgument,
              "two_phase is \"auto\", \"always\" or \"never\", not \"" + name + "\"");
}

// The tree of a state. What goes wrong here is this rank's failure, which the others must hear of:
// it becomes a tree that fails with the same error once the engine takes it up.
StateDict tree_of(nb::handle state, const Bridge& bridge, Claims* claims = nullptr) {
  auto failed = [](const Error& error) {
    ShardedTensorFactory factory;
    factory.build = [error](auto&&...) -> StateNode { throw error; };
    StateDict tree;
    tree[""] = std::move(factory);
    return tree;
  };
  try {
    return to_state(bridge.call("unpack", state), bridge, claims);
  } catch (const Error& error) {
    return failed(error);
  } catch (const nb::python_error& raised) {
    return failed(error_of(raised, "making the state dict"));
  }
}

SaveResult save_state(nb::handle state, const std::string& path, nb::handle bridge_object,
                      nb::handle comm, bool overwrite, const std::string& agreement, double timeout,
                      int threads, uint64_t buffer_bytes, int files_per_rank, nb::handle progress) {
  SaveOptions options;
  options.comm = to_communicator(comm);
  options.overwrite = overwrite;
  options.agreement = agreement_named(agreement);
  options.timeout = timeout;
  options.threads = threads;
  options.buffer_bytes = buffer_bytes;
  options.files_per_rank = files_per_rank;
  options.progress = to_progress(progress);
  const StateDict tree = tree_of(state, Bridge(bridge_object));
  return without_gil([&] { return save(tree, Location(path), options); });
}

nb::typed<nb::dict, nb::any, nb::any> load_state(nb::handle wanted, const std::string& path,
                                                 nb::handle bridge_object, nb::handle comm,
                                                 bool cast, bool verify_checksums,
                                                 const std::string& two_phase, double timeout,
                                                 int threads, uint64_t buffer_bytes,
                                                 nb::handle progress) {
  LoadOptions options;
  options.comm = to_communicator(comm);
  options.cast = cast;
  options.verify_checksums = verify_checksums;
  options.two_phase = two_phase_named(two_phase);
  options.timeout = timeout;
  options.threads = threads;
  options.buffer_bytes = buffer_bytes;
  options.progress = to_progress(progress);
  const Bridge bridge(bridge_object);
  Claims claims;
  const StateDict tree = tree_of(wanted, bridge, &claims);
  options.complete = std::move(claims.complete);
  options.subtrees = std::move(claims.subtrees);
  const StateDict loaded = without_gil([&] { return load(tree, Location(path), options); });
  const nb::object out = from_state(loaded, bridge.call("unpacked"), bridge);
  return nb::borrow<nb::typed<nb::dict, nb::any, nb::any>>(out);
}

}  // namespace

ProgressFn to_progress(nb::handle callback) {
  if (callback.is_none()) return nullptr;
  return [kept = keep_alive(callback)](const Progress& progress) {
    nb::gil_scoped_acquire held;
    kept_object(kept)(progress.phase, progress.bytes_done, progress.bytes_total, progress.seconds);
  };
}

void bind_engine(nb::module_& m) {
  nb::class_<SaveResult>(m, "SaveResult", "What a save did.")
      .def_ro("save_id", &SaveResult::save_id, "The attempt's unique name.")
      .def_ro("bytes_written", &SaveResult::bytes_written, "By this rank.")
      .def_ro("items_written", &SaveResult::items_written, "By this rank.")
      .def("__repr__", [](const SaveResult& result) {
        return "SaveResult(save_id='" + result.save_id +
               "', bytes_written=" + std::to_string(result.bytes_written) +
               ", items_written=" + std::to_string(result.items_written) + ")";
      });
  m.def("save", &save_state, "state"_a, "path"_a, "bridge"_a, "comm"_a.none(), "overwrite"_a,
        "agreement"_a, "timeout"_a, "threads"_a, "buffer_bytes"_a, "files_per_rank"_a,
        "progress"_a.none());
  m.def("load", &load_state, "wanted"_a, "path"_a, "bridge"_a, "comm"_a.none(), "cast"_a,
        "verify_checksums"_a, "two_phase"_a, "timeout"_a, "threads"_a, "buffer_bytes"_a,
        "progress"_a.none());
  m.attr("DEFAULT_TIMEOUT") = kDefaultTimeout;
  m.attr("DEFAULT_BUFFER_BYTES") = static_cast<uint64_t>(BufferPool::kDefaultTotal);
}

}  // namespace tilestone::python
