// The check of all ranks' main replicas, for callers that gather the ranks' shards themselves.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include "python/src/bindings.h"
#include "tilestone/plan/access.h"
#include "tilestone/state/items.h"

namespace tilestone::python {
namespace {

using nb::literals::operator""_a;

using TensorPart = std::tuple<std::string, std::string, Dims, Dims, Dims, bool>;
using ObjectPart = std::pair<std::string, bool>;

nb::bytes encode_access(const std::vector<TensorPart>& tensors,
                        const std::vector<ObjectPart>& objects) {
  Items items;
  for (const auto& [key, dtype, global_shape, offset, shape, main] : tensors) {
    TensorItem& item = items.tensors.emplace_back();
    item.key = key;
    item.dtype = dtype_named(dtype);
    item.global_shape = global_shape;
    item.replica_id = {main ? 0 : 1};
    item.pieces.push_back({{offset, shape}, {}});
  }
  for (const auto& [key, main] : objects) {
    ObjectItem& item = items.objects.emplace_back();
    item.key = key;
    item.replica_id = {main ? 0 : 1};
  }
  return python_bytes(tilestone::encode_access(items));
}

void check_encoded(const std::vector<nb::bytes>& ranks) {
  std::vector<ByteView> plans;
  plans.reserve(ranks.size());
  for (const nb::bytes& plan : ranks) {
    plans.push_back(byte_view(plan));
  }
  const nb::gil_scoped_release released;
  check_access(plans);
}

}  // namespace

void bind_access(nb::module_& m) {
  m.def(
      "encode_access", &encode_access, "tensors"_a, "objects"_a,
      "Encodes what one rank holds, for check_access: shards as (key, name of dtype, global shape, "
      "offset, shape, is the main replica), and objects as (unique key, is the main replica). "
      "Raises InvalidArgumentError for a shard outside its tensor.");
  m.def("check_access", &check_encoded, "ranks"_a,
        "Checks that the main replicas of all ranks hold each tensor and each grid of objects "
        "exactly once. Raises MismatchError, CoverageError or InvalidArgumentError, with key, box "
        "and ranks. ranks[r]: the result of encode_access() on rank r.");
}

}  // namespace tilestone::python
