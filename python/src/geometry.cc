// Boxes, meshes and placements.
#include <nanobind/operators.h>

#include "python/src/bindings.h"

namespace tilestone::python {
namespace {

using nb::literals::operator""_a;

using Names = std::vector<const char*>;

nb::tuple values_of(nb::handle object, const Names& names) {
  nb::list found;
  for (const char* name : names) found.append(object.attr(name));
  return nb::tuple(found);
}

// Makes objects of a class pickled by these attributes, with which it is made.
template <typename T>
void pickled_by(nb::class_<T>& bound, const Names& names) {
  bound.def(
      "__reduce__",
      [names](nb::handle self) { return nb::make_tuple(self.type(), values_of(self, names)); },
      nb::sig("def __reduce__(self) -> tuple[object, ...]"));
}

// And equal and hashed by them, too.
template <typename T>
void by_value(nb::class_<T>& bound, const Names& names) {
  pickled_by(bound, names);
  bound
      .def(
          "__eq__",
          [names](nb::handle self, nb::handle other) {
            return nb::isinstance<T>(other) &&
                   values_of(self, names).equal(values_of(other, names));
          },
          "other"_a, nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__", [names](nb::handle self) { return nb::hash(values_of(self, names)); });
}

void bind_box(nb::module_& m) {
  nb::class_<Box> bound(m, "Box",
                        "A half-open n-dimensional range of a tensor's elements: `offset` and "
                        "`shape`, both in elements.");
  bound
      .def(
          "__init__",
          [](Box* self, Dims offset, Dims shape) {
            if (offset.size() != shape.size()) {
              throw Error(ErrorCode::kInvalidArgument,
                          "a box's offset and shape must have the same number of dims, not " +
                              to_string(offset) + " and " + to_string(shape));
            }
            new (self) Box{std::move(offset), std::move(shape)};
          },
          "offset"_a, "shape"_a)
      .def_ro("offset", &Box::offset, "The first element in each dim.")
      .def_ro("shape", &Box::shape, "The number of elements in each dim.")
      .def_prop_ro("numel", &Box::numel, "Number of elements.")
      .def_prop_ro(
          "slices",
          [](const Box& box) {
            nb::list out;
            for (size_t i = 0; i < box.rank(); ++i) {
              out.append(nb::steal(
                  PySlice_New(nb::int_(box.offset[i]).ptr(), nb::int_(box.end(i)).ptr(), nullptr)));
            }
            return nb::tuple(out);
          },
          nb::sig("def slices(self) -> tuple[slice, ...]"),
          "The box as an index: array[box.slices].")
      .def("__repr__", [](const Box& box) { return "Box(" + to_string(box) + ")"; });
  by_value(bound, {"offset", "shape"});
}

// A placement, and the names of its fields, which its constructor takes.
template <typename P>
void bind_placement(nb::class_<P>& bound, const Names& names) {
  bound.def("__repr__", [](const P& p) { return to_string(Placement(p)); });
  by_value(bound, names);
}

void bind_placements(nb::module_& m) {
  nb::class_<Shard> shard(m, "Shard",
                          "Splits tensor dim `dim` into torch.chunk's sizes: chunks of "
                          "ceil(n / ranks) elements, of which the last ones are shorter or empty.");
  shard.def(
           "__init__", [](Shard* self, int64_t dim) { new (self) Shard{dim}; }, "dim"_a)
      .def_ro("dim", &Shard::dim);
  bind_placement(shard, {"dim"});
  nb::class_<StridedShard> strided(
      m, "StridedShard",
      "torch's _StridedShard: mesh dims further right first split `dim` into `split` parts; then "
      "each part is split into this mesh dim's shards (FSDP2 over TP).");
  strided
      .def(
          "__init__",
          [](StridedShard* self, int64_t dim, int64_t split) {
            new (self) StridedShard{dim, split};
          },
          "dim"_a, "split"_a)
      .def_ro("dim", &StridedShard::dim)
      .def_ro("split", &StridedShard::split);
  bind_placement(strided, {"dim", "split"});
  nb::class_<Replicate> replicate(m, "Replicate", "The same on every rank of the mesh dim.");
  replicate.def(nb::init<>());
  bind_placement(replicate, {});
  nb::class_<Partial> partial(m, "Partial", "A pending sum over the mesh dim; it can't be saved.");
  partial.def(nb::init<>());
  bind_placement(partial, {});
}

void bind_mesh(nb::module_& m) {
  nb::class_<Mesh> bound(m, "Mesh",
                         "Ranks in an n-dimensional grid with names, like torch's DeviceMesh.");
  bound
      .def(
          "__init__",
          [](Mesh* self, Dims shape, std::optional<std::vector<int>> ranks,
             std::vector<std::string> names) {
            if (ranks) {
              new (self) Mesh(std::move(shape), std::move(*ranks), std::move(names));
            } else {
              new (self) Mesh(Mesh::grid(std::move(shape), std::move(names)));
            }
          },
          "shape"_a, "ranks"_a = nb::none(), "names"_a = std::vector<std::string>(),
          "`ranks` holds the global ranks in C order; by default they are 0, 1, 2 ...\n"
          "Raises InvalidArgumentError if a rank or name occurs twice or their number is wrong.")
      .def_prop_ro("shape", [](const Mesh& mesh) { return mesh.shape(); })
      .def_prop_ro("ranks", [](const Mesh& mesh) { return mesh.ranks(); })
      .def_prop_ro("names", [](const Mesh& mesh) { return mesh.names(); })
      .def("coordinate", &Mesh::coordinate, "rank"_a,
           "The position of a global rank in the mesh; None for a rank outside it.")
      .def("rank_at", &Mesh::rank_at, "coordinate"_a)
      .def("__repr__", [](const Mesh& mesh) { return "Mesh(" + to_string(mesh.shape()) + ")"; });
  pickled_by(bound, {"shape", "ranks", "names"});
}

void bind_boxes_of_placements(nb::module_& m) {
  nb::class_<LocalBoxes>(m, "LocalBoxes", "What one rank holds of a tensor.")
      .def_ro("local_shape", &LocalBoxes::local_shape, "Shape of the local tensor.")
      .def_ro("boxes", &LocalBoxes::boxes, "Its boxes in the global tensor.")
      .def_ro("locals", &LocalBoxes::locals,
              "locals[i] is the box of the local tensor that holds boxes[i].");
  m.def(
      "local_boxes",
      [](const Dims& global_shape, const Mesh& mesh, const Dims& coordinate,
         const std::vector<Placement>& placements) {
        return local_boxes(global_shape, mesh, coordinate, placements);
      },
      "global_shape"_a, "mesh"_a, "coordinate"_a, "placements"_a,
      "The boxes that the rank at `coordinate` of the mesh holds of a tensor with shape "
      "`global_shape` (in elements). An empty shard gives one empty box. Sizes follow torch.chunk, "
      "as in torch's DTensor.\n"
      "Raises InvalidArgumentError for Partial, a dim out of range or a wrong number of "
      "placements.");
  m.def(
      "held_boxes",
      [](const Dims& global_shape, const Mesh& mesh, const Dims& coordinate,
         const std::vector<Placement>& placements, const Dims& local_shape) {
        return held_boxes(global_shape, mesh, coordinate, placements, local_shape);
      },
      "global_shape"_a, "mesh"_a, "coordinate"_a, "placements"_a, "local_shape"_a,
      "The same as local_boxes, for a rank whose local tensor has `local_shape`. If FSDP2 over "
      "tensor parallelism splits unevenly, torch's own reading of the placements does not describe "
      "what the rank holds; this function uses the reading that gives the local shape.\n"
      "Raises UnsupportedError if both readings give this shape but different elements, "
      "InvalidArgumentError if neither does.");
  m.def(
      "replica_id",
      [](const Mesh& mesh, const Dims& coordinate, const std::vector<Placement>& placements) {
        return replica_id(mesh, coordinate, placements);
      },
      "mesh"_a, "coordinate"_a, "placements"_a,
      "The coordinate along the Replicate dims only; all zeros for the main replica.");
  m.def(
      "replica_holders",
      [](const Mesh& mesh, const Dims& coordinate, const std::vector<Placement>& placements) {
        return replica_holders(mesh, coordinate, placements);
      },
      "mesh"_a, "coordinate"_a, "placements"_a,
      "The global ranks that hold the same boxes, ascending, this one included.");
  m.def(
      "flat_range_to_boxes",
      [](const Dims& shape, int64_t begin, int64_t end) {
        return flat_range_to_boxes(shape, {begin, end});
      },
      "shape"_a, "begin"_a, "end"_a,
      "The elements [begin, end) of a flattened tensor with shape `shape`, as at most 2n - 1 "
      "disjoint boxes in flat order (n: the number of dims).");
}

void bind_merging(nb::module_& m) {
  nb::class_<MergedSharding>(m, "MergedSharding",
                             "The part of the checkpoint's tensor that a rank holds.")
      .def_ro("global_shape", &MergedSharding::global_shape,
              "Shape of the checkpoint's tensor, in elements.")
      .def_ro("strides", &MergedSharding::strides,
              "Strides of the checkpoint's tensor if it were contiguous, in elements.")
      .def_ro("held", &MergedSharding::held, "The boxes that the rank holds.")
      .def_ro("replica_id", &MergedSharding::replica_id,
              "All zeros on exactly one of the ranks that hold the same boxes.")
      .def_ro(
          "holders", &MergedSharding::holders,
          "The global ranks that hold the same boxes, ascending, this one included; empty if the "
          "meshes don't determine them.");
  m.def(
      "merge_shardings",
      [](const Dims& local_shape, const Dims& global_shape, const Mesh& mesh,
         const std::vector<Placement>& placements, const Mesh& checkpoint_mesh,
         const std::vector<Placement>& checkpoint_placements, int rank) {
        return merge_shardings(local_shape, global_shape, Sharding{mesh, placements},
                               Sharding{checkpoint_mesh, checkpoint_placements}, rank);
      },
      "local_shape"_a, "global_shape"_a, "mesh"_a, "placements"_a, "checkpoint_mesh"_a,
      "checkpoint_placements"_a, "rank"_a,
      "Merges a parameter's own mesh and placements with those that the checkpoint has for it "
      "(expert weights under expert parallelism with FSDP2), for the global rank `rank`, which "
      "must be in both meshes. A Shard of the checkpoint is applied outside the parameter's own "
      "shards, unless the parameter already splits the same ranks along the same dim. Ranks are "
      "matched by their numbers, not by the names of mesh dims. Shapes are in elements; "
      "`global_shape` is the parameter's own.\n"
      "Raises InvalidArgumentError if the two contradict each other.");
  m.def(
      "find_rule",
      [](const std::vector<std::string>& patterns, std::string_view name) -> std::optional<int> {
        std::vector<PlacementRule> rules;
        for (const std::string& pattern : patterns) rules.push_back({pattern, {}});
        const int found = find_rule(rules, name);
        return found < 0 ? std::nullopt : std::optional<int>(found);
      },
      "patterns"_a, "name"_a,
      "The index of the most specific pattern that matches the name; None if no pattern matches. "
      "See tilestone.PlacementRules.\n"
      "Raises InvalidArgumentError if two matching patterns are equally specific.");
}

}  // namespace

void bind_geometry(nb::module_& m) {
  bind_box(m);
  bind_placements(m);
  bind_mesh(m);
  bind_boxes_of_placements(m);
  bind_merging(m);
}

}  // namespace tilestone::python
