// Communicators: the library's own, and Python objects in their place.
#include "python/src/bindings.h"

namespace tilestone::python {
namespace {

using nb::literals::operator""_a;

// A Python object with rank, size, describe(), gather(mine, root, timeout), scatter(parts, root,
// timeout), broadcast(mine, root, timeout) and all_to_all(to, timeout). Bytes go in as bytes and
// come back as anything with a buffer; timeouts are seconds, None for no limit. A TimeoutError
// means the deadline passed, a ConnectionError that a rank is gone; either may name ranks.
class PythonCommunicator : public CommunicatorImpl {
 public:
  explicit PythonCommunicator(nb::handle object)
      : object_(keep_alive(object)),
        rank_(nb::cast<int>(object.attr("rank"))),
        size_(nb::cast<int>(object.attr("size"))),
        name_(nb::cast<std::string>(object.attr("describe")())) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string describe() const override { return name_; }

  std::vector<Bytes> gather(ByteView mine, int root, Deadline deadline) override {
    return call("gather", [&](nb::handle self) {
      return many(self.attr("gather")(python_bytes(mine), root, timeout(deadline)));
    });
  }
  Bytes scatter(std::vector<Bytes> parts, int root, Deadline deadline) override {
    return call("scatter", [&](nb::handle self) {
      return one(self.attr("scatter")(python_list(parts), root, timeout(deadline)));
    });
  }
  Bytes broadcast(ByteView mine, int root, Deadline deadline) override {
    return call("broadcast", [&](nb::handle self) {
      return one(self.attr("broadcast")(python_bytes(mine), root, timeout(deadline)));
    });
  }
  std::vector<Bytes> all_to_all(std::vector<Bytes> to, Deadline deadline) override {
    return call("all_to_all", [&](nb::handle self) {
      return many(self.attr("all_to_all")(python_list(to), timeout(deadline)));
    });
  }

 private:
  static nb::object timeout(Deadline deadline) {
    if (deadline.is_never()) return nb::none();
    return nb::float_(std::chrono::duration<double>(deadline.remaining()).count());
  }

  static nb::bytes python_bytes(ByteView bytes) { return nb::bytes(bytes.data(), bytes.size()); }

  static nb::list python_list(const std::vector<Bytes>& parts) {
    nb::list out;
    for (const Bytes& part : parts) out.append(python_bytes(part));
    return out;
  }

  static Bytes one(nb::handle object) {
    Py_buffer buffer;
    if (PyObject_GetBuffer(object.ptr(), &buffer, PyBUF_SIMPLE) != 0) throw nb::python_error();
    const auto* data = static_cast<const std::byte*>(buffer.buf);
    Bytes out(data, data + buffer.len);
    PyBuffer_Release(&buffer);
    return out;
  }

  static std::vector<Bytes> many(nb::handle object) {
    std::vector<Bytes> out;
    if (object.is_none()) return out;
    for (nb::handle item : object) out.push_back(one(item));
    return out;
  }

  template <typename Work>
  std::invoke_result_t<Work, nb::handle> call(const char* operation, Work&& work) {
    nb::gil_scoped_acquire held;
    try {
      return work(kept_object(object_));
    } catch (const nb::python_error& raised) {
      throw failure(operation, raised);
    }
  }

  // TimeoutError and ConnectionError are what the contract names; both may carry `ranks`.
  Error failure(const char* operation, const nb::python_error& raised) const {
    const std::string what = std::string(operation) + " of " + name_;
    nb::object text = nb::steal(PyObject_Str(raised.value().ptr()));
    const std::string message =
        what + ": " + (text.is_valid() ? nb::cast<std::string>(text) : std::string("failed"));
    if (raised.matches(PyExc_TimeoutError)) {
      return named(Error(ErrorCode::kTimeout, message), raised);
    }
    if (raised.matches(PyExc_ConnectionError)) {
      return named(Error(ErrorCode::kRankFailed, message), raised);
    }
    return error_of(raised, what);
  }

  static Error named(Error error, const nb::python_error& raised) {
    nb::object ranks = nb::getattr(raised.value(), "ranks", nb::none());
    std::vector<int> numbers;
    if (!ranks.is_none() && nb::try_cast(ranks, numbers) && !numbers.empty()) {
      error.with_rank(numbers.front());
    }
    return error;
  }

  std::shared_ptr<const void> object_;
  int rank_;
  int size_;
  std::string name_;
};

nb::bytes to_python(const Bytes& bytes) { return nb::bytes(bytes.data(), bytes.size()); }

Deadline deadline_of(std::optional<double> timeout) {
  return timeout ? Deadline::after(std::chrono::duration<double>(*timeout)) : Deadline::never();
}

ByteView view_of(const nb::bytes& bytes) {
  return {static_cast<const std::byte*>(static_cast<const void*>(bytes.c_str())), bytes.size()};
}

std::vector<Bytes> all_of(const std::vector<nb::bytes>& parts) {
  std::vector<Bytes> out;
  for (const nb::bytes& part : parts) out.push_back(to_bytes_owned(part));
  return out;
}

std::vector<nb::bytes> all_to_python(const std::vector<Bytes>& parts) {
  std::vector<nb::bytes> out;
  for (const Bytes& part : parts) out.push_back(to_python(part));
  return out;
}

void bind_calls(nb::class_<Communicator>& bound) {
  bound
      .def(
          "gather",
          [](const Communicator& comm, nb::bytes mine, int root, std::optional<double> timeout) {
            const Deadline deadline = deadline_of(timeout);
            const ByteView view = view_of(mine);
            return all_to_python(
                without_gil([&] { return comm.gather(view, root, deadline); }, WithoutGil::kShort));
          },
          "mine"_a, "root"_a, "timeout"_a = nb::none(),
          "At root every rank's bytes, by rank; elsewhere an empty list.")
      .def(
          "scatter",
          [](const Communicator& comm, const std::vector<nb::bytes>& parts, int root,
             std::optional<double> timeout) {
            auto owned = all_of(parts);
            const Deadline deadline = deadline_of(timeout);
            return to_python(
                without_gil([&] { return comm.scatter(std::move(owned), root, deadline); },
                            WithoutGil::kShort));
          },
          "parts"_a, "root"_a, "timeout"_a = nb::none())
      .def(
          "broadcast",
          [](const Communicator& comm, nb::bytes mine, int root, std::optional<double> timeout) {
            const Deadline deadline = deadline_of(timeout);
            const ByteView view = view_of(mine);
            return to_python(without_gil([&] { return comm.broadcast(view, root, deadline); },
                                         WithoutGil::kShort));
          },
          "mine"_a, "root"_a, "timeout"_a = nb::none())
      .def(
          "all_to_all",
          [](const Communicator& comm, const std::vector<nb::bytes>& to,
             std::optional<double> timeout) {
            auto owned = all_of(to);
            const Deadline deadline = deadline_of(timeout);
            return all_to_python(without_gil(
                [&] { return comm.all_to_all(std::move(owned), deadline); }, WithoutGil::kShort));
          },
          "to"_a, "timeout"_a = nb::none());
}

}  // namespace

Communicator to_communicator(nb::handle object) {
  if (object.is_none()) return solo();
  if (nb::isinstance<Communicator>(object)) return nb::cast<Communicator>(object);
  for (const char* name :
       {"rank", "size", "describe", "gather", "scatter", "broadcast", "all_to_all"}) {
    if (!nb::hasattr(object, name)) {
      throw Error(ErrorCode::kInvalidArgument,
                  std::string("comm is no communicator: it has no \"") + name + "\"");
    }
  }
  return Communicator(std::make_shared<PythonCommunicator>(object));
}

void bind_comm(nb::module_& m) {
  nb::class_<Communicator> bound(m, "Communicator",
                                 "One rank's end of a group. Timeouts are seconds.");
  bound.def_prop_ro("rank", &Communicator::rank)
      .def_prop_ro("size", &Communicator::size)
      .def("describe", &Communicator::describe)
      .def("__repr__", [](const Communicator& comm) {
        return "Communicator(" + comm.describe() + ", rank " + std::to_string(comm.rank()) +
               " of " + std::to_string(comm.size()) + ")";
      });
  bind_calls(bound);
  m.def("solo", &solo, "A group of one rank.");
  m.def(
      "mpi_world", [] { return without_gil([] { return mpi_world(); }, WithoutGil::kShort); },
      "A duplicate of MPI_COMM_WORLD. Raises UnsupportedError in a build without MPI.");
  m.def(
      "run_ranks",
      [](int n, nb::callable body) {
        auto kept = keep_alive(body);
        without_gil([&] {
          run_ranks(n, [&](Communicator comm) {
            nb::gil_scoped_acquire held;
            kept_object(kept)(comm);
          });
        });
      },
      "n"_a, "body"_a,
      nb::sig(
          "def run_ranks(n: int, body: collections.abc.Callable[[Communicator], object]) -> None"),
      "Runs body(comm) on n threads of this process, one a rank, and returns when all have "
      "ended. The first error (lowest rank) is raised; ranks that wait for one that raised get "
      "RankFailedError.");
}

}  // namespace tilestone::python
