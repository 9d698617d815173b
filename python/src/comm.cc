// Communicators: the library's own, and those written in Python.
#include "python/src/bindings.h"
#include "python/src/requests.h"
#include "tilestone/comm/call_port.h"
#include "tilestone/engine/agree.h"

namespace tilestone::python {
namespace {

using nb::literals::operator""_a;

// A communicator that is a Python object with rank, size, describe(), gather(mine, timeout),
// scatter(parts, timeout), broadcast(mine, timeout) and all_to_all(to, timeout). Bytes are passed
// as `bytes` and returned as any object with a buffer. Timeouts are in seconds, None for no limit.
// TimeoutError means that the deadline passed, ConnectionError that a rank is gone; either may have
// `ranks`.
//
// An object that has `call_memory` (a tilestone._core.CallMemory, the same for all objects of one
// rank of one group) is a CallPort, too. It has post({rank: bytes}, timeout, check),
// newest(wait, timeout, check), which waits up to `wait` seconds for the first notice and returns a
// list of (rank, bytes), last_operation(), enter(call), abort(error), announce_last() and leave().
// Its operations have one more argument, `check`: they call check() about every 50 ms while they
// wait, and end if it raises. An operation that was ended by another rank's abort(error) raises an
// exception with these bytes as `error`.
//
// If the object has no `call_memory`, the ranks do not agree on calls. They must then make the same
// saves and loads: if a rank skips one, its later calls no longer match those of the others.
class PythonCommunicator : public CommunicatorImpl, private CallPort {
 public:
  explicit PythonCommunicator(nb::handle object)
      : object_(keep_alive(object)),
        rank_(nb::cast<int>(object.attr("rank"))),
        size_(nb::cast<int>(object.attr("size"))),
        name_(nb::cast<std::string>(object.attr("describe")())) {
    nb::object memory = nb::getattr(object, "call_memory", nb::none());
    if (!memory.is_none()) memory_ = nb::cast<CallMemory*>(memory);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string describe() const override { return name_; }

  std::vector<Bytes> gather(ByteView mine, Deadline deadline) override {
    return call("gather", deadline, [&](nb::handle self) {
      return many(operate(self.attr("gather"), deadline, python_bytes(mine)));
    });
  }
  Bytes scatter(std::vector<Bytes> parts, Deadline deadline) override {
    return call("scatter", deadline, [&](nb::handle self) {
      return one(operate(self.attr("scatter"), deadline, python_list(parts)));
    });
  }
  Bytes broadcast(ByteView mine, Deadline deadline) override {
    return call("broadcast", deadline, [&](nb::handle self) {
      return one(operate(self.attr("broadcast"), deadline, python_bytes(mine)));
    });
  }
  std::vector<Bytes> all_to_all(std::vector<Bytes> to, Deadline deadline) override {
    return call("all_to_all", deadline, [&](nb::handle self) {
      return many(operate(self.attr("all_to_all"), deadline, python_list(to)));
    });
  }

  CallPort* call_port() override { return memory_ == nullptr ? nullptr : this; }

 private:
  void post(std::vector<Notice> notices, Deadline deadline) override {
    call("rendezvous", deadline, [&](nb::handle self) {
      nb::dict by_rank;
      for (const Notice& notice : notices) {
        by_rank[nb::int_(notice.rank)] = python_bytes(notice.bytes);
      }
      operate(self.attr("post"), deadline, by_rank);
    });
  }
  std::vector<Notice> newest(Deadline deadline, Deadline limit) override {
    return call("rendezvous", limit, [&](nb::handle self) {
      std::vector<Notice> notices;
      for (nb::handle item : operate(self.attr("newest"), limit, timeout(deadline))) {
        notices.push_back({nb::cast<int>(item[0]), one(item[1]), {}});
      }
      return notices;
    });
  }
  uint64_t last_operation() const override {
    return with_gil("last_operation", [&] {
      return nb::cast<uint64_t>(kept_object(object_).attr("last_operation")());
    });
  }
  void enter(uint64_t number) override {
    with_gil("enter", [&] { kept_object(object_).attr("enter")(number); });
  }
  void abort(const Error& why) override {
    const Bytes encoded = why.encode();
    call("message that ends a call", Deadline::never(),
         [&](nb::handle self) { self.attr("abort")(python_bytes(encoded)); });
  }
  void announce_last() override {
    with_gil("announce_last", [&] { kept_object(object_).attr("announce_last")(); });
  }
  void leave() override {
    with_gil("leave", [&] { kept_object(object_).attr("leave")(); });
  }
  CallMemory& memory() override { return *memory_; }

  template <typename... Args>
  nb::object operate(const nb::object& method, Deadline deadline, Args&&... args) const {
    if (memory_ == nullptr) return method(std::forward<Args>(args)..., timeout(deadline));
    const auto check = nb::cpp_function([deadline] { static_cast<void>(deadline.expired()); });
    return method(std::forward<Args>(args)..., timeout(deadline), check);
  }

  static nb::object timeout(Deadline deadline) {
    if (deadline.is_never()) return nb::none();
    return nb::float_(std::chrono::duration<double>(deadline.remaining()).count());
  }

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
  std::invoke_result_t<Work, nb::handle> call(const char* operation, Deadline deadline,
                                              Work&& work) {
    const std::string caller = std::string("code that ran during a ") + operation;
    // This runs on the thread that called save or load, like all Python code.
    return with_gil(caller, [&] {
      try {
        return work(kept_object(object_));
      } catch (const nb::python_error& raised) {
        static_cast<void>(deadline.expired());  // throws the interrupt's reason itself
        // KeyboardInterrupt and SystemExit are raised to the caller unchanged.
        if (!raised.matches(PyExc_Exception)) throw;
        throw failure(operation, caller, raised);
      }
    });
  }

  // The contract has TimeoutError and ConnectionError; both may have `ranks`.
  Error failure(const char* operation, const std::string& caller,
                const nb::python_error& raised) const {
    const nb::object ended = nb::getattr(raised.value(), "error", nb::none());
    if (nb::isinstance<nb::bytes>(ended)) return Error::decode(one(ended));
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
    return error_of(raised, caller);
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
  CallMemory* memory_ = nullptr;  // the object's call_memory
};

Deadline deadline_of(std::optional<double> timeout) {
  return timeout ? end_after(*timeout) : Deadline::never();
}

std::vector<Bytes> all_of(const std::vector<nb::bytes>& parts) {
  std::vector<Bytes> out;
  for (const nb::bytes& part : parts) out.push_back(to_bytes_owned(part));
  return out;
}

std::vector<nb::bytes> all_to_python(const std::vector<Bytes>& parts) {
  std::vector<nb::bytes> out;
  for (const Bytes& part : parts) out.push_back(python_bytes(part));
  return out;
}

template <typename Operation>
auto operated(std::optional<double> timeout, const Operation& operation) {
  const Deadline deadline = deadline_of(timeout);
  return without_gil([&](const Stop& stop) { return operation(deadline.with_interrupt(stop)); });
}

void bind_calls(nb::class_<Communicator>& bound) {
  using Timeout = std::optional<double>;
  using Parts = std::vector<nb::bytes>;
  bound
      .def(
          "gather",
          [](const Communicator& comm, nb::bytes mine, Timeout timeout) {
            const auto work = [&, view = byte_view(mine)](const Deadline& deadline) {
              return comm.gather(view, deadline);
            };
            return all_to_python(operated(timeout, work));
          },
          "mine"_a, "timeout"_a = nb::none(),
          "On rank 0, every rank's bytes in the order of ranks; on other ranks an empty list.")
      .def(
          "scatter",
          [](const Communicator& comm, const Parts& parts, Timeout timeout) {
            const auto work = [&, owned = all_of(parts)](const Deadline& deadline) {
              return comm.scatter(owned, deadline);
            };
            return python_bytes(operated(timeout, work));
          },
          "parts"_a, "timeout"_a = nb::none())
      .def(
          "broadcast",
          [](const Communicator& comm, nb::bytes mine, Timeout timeout) {
            const auto work = [&, view = byte_view(mine)](const Deadline& deadline) {
              return comm.broadcast(view, deadline);
            };
            return python_bytes(operated(timeout, work));
          },
          "mine"_a, "timeout"_a = nb::none())
      .def(
          "all_to_all",
          [](const Communicator& comm, const Parts& to, Timeout timeout) {
            const auto work = [&, owned = all_of(to)](const Deadline& deadline) {
              return comm.all_to_all(owned, deadline);
            };
            return all_to_python(operated(timeout, work));
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
                  std::string("comm must be a communicator: it has no \"") + name + "\"");
    }
  }
  return Communicator(std::make_shared<PythonCommunicator>(object));
}

void bind_comm(nb::module_& m) {
  nb::class_<CallMemory>(m, "CallMemory",
                         "What a rank's communicator keeps from one call to the next.")
      .def(nb::init<>());
  nb::class_<Communicator> bound(m, "Communicator", nb::is_weak_referenceable(),
                                 "One rank's end of a group. Timeouts are in seconds.");
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
      "mpi_world",
      [](std::optional<double> timeout) {
        const Deadline deadline = deadline_of(timeout);
        return without_gil([&] { return mpi_world(deadline); }, WithoutGil::kShort);
      },
      "timeout"_a = nb::none(),
      "A duplicate of MPI_COMM_WORLD. Every rank of the job must call this, within `timeout` "
      "seconds. It calls MPI_Init if that was not called yet, which waits for all ranks without a "
      "limit. Raises UnsupportedError in a build without MPI.");
}

}  // namespace tilestone::python
