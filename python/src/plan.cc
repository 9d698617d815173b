// The distribution of shards over ranks, and rounds of agreement.
#include "python/src/bindings.h"
#include "python/src/requests.h"
#include "tilestone/engine/agree.h"
#include "tilestone/plan/distribution.h"

namespace tilestone::python {
namespace {

using nb::literals::operator""_a;

std::vector<int> distribute(const std::vector<uint64_t>& bytes,
                            const std::vector<uint32_t>& holders,
                            const std::vector<bool>& main_is_outside,
                            const std::vector<std::vector<int>>& holder_sets, int ranks) {
  if (holders.size() != bytes.size() || main_is_outside.size() != bytes.size()) {
    throw Error(ErrorCode::kInvalidArgument,
                "bytes, holders and main_is_outside must have one entry for each shard");
  }
  std::vector<DistributedShard> shards;
  shards.reserve(bytes.size());
  for (size_t i = 0; i < bytes.size(); ++i) {
    shards.push_back({bytes[i], holders[i], main_is_outside[i]});
  }
  return distribute_shards(shards, holder_sets, ranks);
}

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
  m.def("distribute_shards", &distribute, "bytes"_a, "holders"_a, "main_is_outside"_a,
        "holder_sets"_a, "ranks"_a,
        "Chooses a rank for each shard, as Megatron-Core does. Shards are in the order of their "
        "ids.\n"
        "`holders[i]` is the index in `holder_sets` of the ranks that hold shard i; ranks are 0 to "
        "`ranks` - 1.\n"
        "Raises InvalidArgumentError for a shard without holders or a number out of range.");
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
