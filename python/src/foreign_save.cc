// Saves that torch.distributed.checkpoint plans.
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "python/src/bindings.h"
#include "python/src/requests.h"
#include "tilestone/engine/save/foreign_save.h"

namespace tilestone::python {
namespace {

using nb::literals::operator""_a;

using Transformed = std::tuple<std::string, Dims, Box>;  // dtype, global shape, box
using Encoded = std::tuple<std::string, nb::bytes, std::optional<Transformed>>;
using Chunk = std::tuple<std::string, Dims, Box, TensorView>;
using Place = std::tuple<nb::object, uint64_t, uint64_t>;  // file, offset, length

ForeignBytes encoded_of(const Encoded& given) {
  ForeignBytes made{std::get<0>(given), shared_bytes(std::get<1>(given)), std::nullopt};
  if (const auto& chunk = std::get<2>(given)) {
    made.chunk.emplace(ForeignBytes::Chunk{dtype_named(std::get<0>(*chunk)), std::get<1>(*chunk),
                                           std::get<2>(*chunk)});
  }
  return made;
}

std::vector<Place> places_of(const std::vector<ForeignPlace>& places) {
  std::vector<Place> made;
  for (const ForeignPlace& place : places) {
    made.emplace_back(python_text(place.file), place.offset, place.length);
  }
  return made;
}

nb::tuple write(const nb::bytes& path, const std::string& save_id, int rank, int world_size,
                const std::string& sibling, int first_file, const std::vector<Encoded>& encoded,
                const std::vector<Chunk>& chunks, const Resources& resources, double seconds) {
  const Entered entered;
  const Location location(path_of(path));
  ForeignShare share{save_id, rank, world_size, sibling, first_file, {}, {}};
  for (const Encoded& each : encoded) share.encoded.push_back(encoded_of(each));
  for (const auto& [key, shape, box, data] : chunks) {
    share.chunks.push_back({key, shape, box, data});
  }
  const Deadline deadline = end_after(seconds);
  const ForeignWritten written = without_gil([&](const Stop& stop) {
    return write_foreign(location, share, resources, deadline.with_interrupt(stop));
  });
  return nb::make_tuple(python_bytes(written.receipt), written.files, places_of(written.encoded),
                        places_of(written.chunks));
}

// The thread that renews its claim may need the GIL to end.
struct HeldSave : ForeignSave {
  explicit HeldSave(ForeignSave&& begun) : ForeignSave(std::move(begun)) {}
  HeldSave(HeldSave&&) noexcept = default;
  ~HeldSave() {
    try {
      without_gil([&] { const ForeignSave ended = std::move(*this); }, WithoutGil::kShort);
    } catch (...) {
      // The interpreter is ending: it is destroyed all the same.
    }
  }
};

HeldSave begin(const nb::bytes& path, std::string save_id, bool overwrite, double seconds) {
  const Entered entered;
  const Location location(path_of(path));
  const Deadline deadline = end_after(seconds);
  return HeldSave(without_gil([&](const Stop& stop) {
    return ForeignSave(location, std::move(save_id), overwrite, deadline.with_interrupt(stop));
  }));
}

void commit(HeldSave& save, const std::vector<nb::bytes>& receipts, int world_size,
            const nb::bytes& index, const std::vector<std::string>& files, double seconds) {
  const Entered entered;
  std::vector<Bytes> owned;
  for (const nb::bytes& receipt : receipts) owned.push_back(to_bytes_owned(receipt));
  const Deadline deadline = end_after(seconds);
  Bytes described = to_bytes_owned(index);
  without_gil([&](const Stop& stop) {
    save.commit(owned, world_size, std::move(described), files, deadline.with_interrupt(stop));
  });
}

}  // namespace

void bind_foreign_save(nb::module_& m) {
  nb::class_<HeldSave>(m, "ForeignSave", "The coordinator's part of a save that torch plans.")
      .def(nb::new_(&begin), "path"_a, "save_id"_a, "overwrite"_a, "seconds"_a)
      .def_prop_ro("save_id", &ForeignSave::save_id)
      .def_prop_ro("sibling", &ForeignSave::sibling,
                   "The directory beside the path in which the ranks write; empty: in the path.")
      .def("commit", &commit, "receipts"_a, "world_size"_a, "index"_a, "files"_a, "seconds"_a)
      .def(
          "abandon",
          [](HeldSave& save, bool none_writes) { without_gil([&] { save.abandon(none_writes); }); },
          "none_writes"_a);
  m.def("write_foreign", &write, "path"_a, "save_id"_a, "rank"_a, "world_size"_a, "sibling"_a,
        "first_file"_a, "encoded"_a, "chunks"_a, "resources"_a, "seconds"_a,
        nb::sig("def write_foreign(path: bytes, save_id: str, rank: int, world_size: int, sibling: "
                "str, first_file: int, encoded: collections.abc.Sequence[tuple[str, bytes, "
                "tuple[str, tuple[int, ...], Box] | None]], chunks: "
                "collections.abc.Sequence[tuple[str, tuple[int, ...], Box, TensorView]], "
                "resources: Resources, seconds: float) -> tuple[bytes, int, list[tuple[str, int, "
                "int]], list[tuple[str, int, int]]]"),
        "Writes items to new files. Returns the receipt, how many files were written, and the "
        "(file, offset, length) of each item.");
}

}  // namespace tilestone::python
