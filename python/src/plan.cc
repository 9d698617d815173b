// Rounds of agreement.
#include "python/src/bindings.h"
#include "python/src/requests.h"
#include "tilestone/engine/agree.h"

namespace tilestone::python {
namespace {

using nb::literals::operator""_a;

// say(round, answer) -> bytes; decide(round, said) -> (answer, last).
nb::bytes agree_in_python(const std::string& work, nb::handle comm, const nb::callable& say,
                          const nb::callable& decide, double seconds) {
  const Entered entered;
  const Communicator communicator = to_communicator(comm);
  const auto say_bytes = [&](int round, const Bytes& answer) {
    return with_gil(work, [&] {
      return to_bytes_owned(nb::cast<nb::bytes>(say(round, python_bytes(answer))));
    });
  };
  const auto decide_bytes = [&](int round, const std::vector<Bytes>& said) {
    return with_gil(work, [&] {
      nb::list all;
      for (const Bytes& each : said) all.append(python_bytes(each));
      const auto decided = nb::cast<std::pair<nb::bytes, bool>>(decide(round, all));
      return Decision{to_bytes_owned(decided.first), decided.second};
    });
  };
  const Deadline deadline = end_after(seconds);
  return python_bytes(without_gil([&](const Stop& stop) {
    return agree(communicator, work, deadline.with_interrupt(stop), say_bytes, decide_bytes);
  }));
}

}  // namespace

void bind_plan(nb::module_& m) {
  m.def("agree", &agree_in_python, "work"_a, "comm"_a.none(), "say"_a, "decide"_a, "seconds"_a,
        nb::sig("def agree(work: str, comm: object, say: collections.abc.Callable[[int, bytes], "
                "bytes], decide: collections.abc.Callable[[int, list[bytes]], tuple[bytes, bool]], "
                "seconds: float) -> bytes"),
        "Runs rounds in which all ranks fail together. In each round, every rank calls say(round, "
        "answer of the previous round) and sends the result to rank 0. Rank 0 calls decide(round, "
        "results), which returns (answer, is the last round), and every rank gets the answer.\n"
        "If either function raises on any rank, every rank raises. Returns the last answer.");
}

}  // namespace tilestone::python
