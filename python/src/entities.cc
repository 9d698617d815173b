// The entities of a state dict, as the library gets them. The classes that users see are in
// tilestone._objects.entities.
#include "python/src/bindings.h"

namespace tilestone::python {
namespace {

using nb::literals::operator""_a;
using Offsets = std::vector<std::tuple<int64_t, int64_t, int64_t>>;

std::vector<RankOffset> rank_offsets(const Offsets& offsets) {
  std::vector<RankOffset> out;
  out.reserve(offsets.size());
  for (const auto& [axis, rank, fragments] : offsets) out.push_back({axis, rank, fragments});
  return out;
}

std::optional<FlatRange> flat_range(const std::optional<std::pair<int64_t, int64_t>>& range) {
  if (!range) return std::nullopt;
  return FlatRange{range->first, range->second};
}

// `data` has the shape of like.data. nullopt if it is held in several pieces.
std::optional<ShardedTensor> of_other_data(const ShardedTensor& like, std::string key,
                                           TensorView data) {
  const auto& pieces = like.pieces;
  if (pieces.size() > 1 || (!pieces.empty() && pieces[0].data.shape != data.shape)) {
    return std::nullopt;
  }
  ShardedTensor tensor = like;
  tensor.key = std::move(key);
  if (!pieces.empty()) tensor.pieces[0].data = data;
  tensor.data = std::move(data);
  return tensor;
}

void bind_sharded_tensor(nb::module_& m) {
  nb::class_<ShardedTensor>(m, "ShardedTensor")
      .def_static(
          "from_rank_offsets",
          [](std::string key, TensorView data, const Offsets& offsets, Dims replica_id,
             int64_t prepend_axis_num) {
            return ShardedTensor::from_rank_offsets(std::move(key), std::move(data),
                                                    rank_offsets(offsets), std::move(replica_id),
                                                    prepend_axis_num);
          },
          "key"_a, "data"_a, "offsets"_a, "replica_id"_a, "prepend_axis_num"_a)
      .def_static(
          "from_rank_offsets_flat",
          [](std::string key, TensorView data, const Dims& local_shape, int64_t begin, int64_t end,
             const Offsets& offsets, Dims replica_id, int64_t prepend_axis_num) {
            return ShardedTensor::from_rank_offsets_flat(
                std::move(key), std::move(data), local_shape, {begin, end}, rank_offsets(offsets),
                std::move(replica_id), prepend_axis_num);
          },
          "key"_a, "data"_a, "local_shape"_a, "begin"_a, "end"_a, "offsets"_a, "replica_id"_a,
          "prepend_axis_num"_a)
      .def_static(
          "from_placements",
          [](std::string key, TensorView local, const Dims& global_shape, const Mesh& mesh,
             const std::vector<Placement>& placements, int rank) {
            return ShardedTensor::from_placements(std::move(key), std::move(local), global_shape,
                                                  mesh, placements, rank);
          },
          "key"_a, "local"_a, "global_shape"_a, "mesh"_a, "placements"_a, "rank"_a)
      .def_static(
          "from_param",
          [](std::string key, TensorView local, const Dims& param_shape, const Mesh& mesh,
             const std::vector<Placement>& placements, const Mesh& checkpoint_mesh,
             const std::vector<Placement>& checkpoint_placements, int rank) {
            return ShardedTensor::from_param(
                std::move(key), std::move(local), param_shape, Sharding{mesh, placements},
                Sharding{checkpoint_mesh, checkpoint_placements}, rank);
          },
          "key"_a, "local"_a, "param_shape"_a, "mesh"_a, "placements"_a, "checkpoint_mesh"_a,
          "checkpoint_placements"_a, "rank"_a)
      .def_static("from_box", &ShardedTensor::from_box, "key"_a, "data"_a, "global_shape"_a,
                  "box"_a, "replica_id"_a, "prepend_axis_num"_a)
      .def_static(
          "from_box_flat",
          [](std::string key, TensorView data, const Dims& global_shape, const Box& box,
             int64_t begin, int64_t end, Dims replica_id, int64_t prepend_axis_num) {
            return ShardedTensor::from_box_flat(std::move(key), std::move(data), global_shape, box,
                                                {begin, end}, std::move(replica_id),
                                                prepend_axis_num);
          },
          "key"_a, "data"_a, "global_shape"_a, "box"_a, "begin"_a, "end"_a, "replica_id"_a,
          "prepend_axis_num"_a)
      .def_static(
          "from_pieces",
          [](std::string key, TensorView data, const Dims& global_shape,
             const std::vector<std::pair<Box, TensorView>>& pieces) {
            std::vector<Piece> held;
            for (const auto& [box, view] : pieces) held.push_back({box, view});
            return ShardedTensor::from_pieces(std::move(key), std::move(data), global_shape,
                                              std::move(held));
          },
          "key"_a, "data"_a, "global_shape"_a, "pieces"_a)
      .def("of_other_data", &of_other_data, "key"_a, "data"_a,
           "Like this one, made from data of the same shape: with other elements, dtype and key. "
           "None if it has to be made anew.")
      .def_ro("key", &ShardedTensor::key)
      .def_prop_ro("global_shape", [](const ShardedTensor& t) { return t.global_shape; })
      .def_prop_ro("boxes",
                   [](const ShardedTensor& t) {
                     std::vector<Box> boxes;
                     for (const Piece& piece : t.pieces) boxes.push_back(piece.box);
                     return boxes;
                   })
      .def_prop_rw(
          "holders", [](const ShardedTensor& t) { return t.holders; },
          [](ShardedTensor& t, std::vector<int> ranks) {
            if (ranks.empty()) {
              t.holders.clear();
            } else {
              t.declare_replicas(std::move(ranks));
            }
          })
      .def_prop_rw(
          "replica_id", [](const ShardedTensor& t) { return t.replica_id; },
          [](ShardedTensor& t, Dims id) { t.replica_id = std::move(id); })
      .def_rw("unknown_replicas", &ShardedTensor::unknown_replicas)
      .def_rw("allow_shape_mismatch", &ShardedTensor::allow_shape_mismatch)
      .def_prop_ro("is_regular_grid", &ShardedTensor::is_regular_grid);
}

void bind_factory(nb::module_& m) {
  nb::class_<ShardedTensorFactory>(m, "ShardedTensorFactory")
      .def_static(
          "make",
          [](std::string key, TensorView data, nb::object original, nb::object build_fn,
             nb::object merge_fn, Dims replica_id, std::optional<std::pair<int64_t, int64_t>> range,
             nb::handle bridge_object) {
            const Bridge bridge(bridge_object);
            const std::string who = "\"" + key + "\"";
            ShardedTensorFactory factory;
            // If the original is not filled in place, the factory needs no data and keeps none.
            const bool in_place = kept_object(data.owner).is(original);
            factory.data =
                in_place ? std::move(data) : TensorView::without_data(data.dtype, data.shape);
            factory.replica_id = std::move(replica_id);
            factory.flat_range = flat_range(range);
            factory.build = [build = keep_alive(build_fn), kept = keep_alive(original), bridge,
                             who](const std::string& build_key, const TensorView&,
                                  const ReplicaId& replica, const std::optional<FlatRange>& flat) {
              return with_gil("the build function of factory " + who, [&] {
                nb::object slice = nb::none();
                if (flat) slice = nb::make_tuple(flat->begin, flat->end);
                nb::object built =
                    kept_object(build)(build_key, nb::borrow(kept_object(kept)), replica, slice);
                return to_node(built, bridge);
              });
            };
            factory.merge = [merge = keep_alive(merge_fn), bridge, who](StateNode loaded) {
              return with_gil("the merge function of factory " + who, [&] {
                nb::object tree = from_node(loaded, nb::none(), bridge);
                return object_node(kept_object(merge)(tree));
              });
            };
            factory.key = std::move(key);
            return factory;
          },
          "key"_a, "data"_a, "original"_a, "build"_a, "merge"_a, "replica_id"_a,
          "flattened_range"_a.none(), "bridge"_a);
}

}  // namespace

void bind_entities(nb::module_& m) {
  bind_sharded_tensor(m);
  nb::class_<ShardedObject>(m, "ShardedObject")
      .def_static(
          "make",
          [](std::string key, nb::handle data, Dims global_shape, Dims global_offset,
             Dims replica_id, nb::handle bridge) {
            Value value = bridge.is_none() ? Value() : to_value(data, Bridge(bridge), {key});
            return ShardedObject::make(std::move(key), std::move(value), std::move(global_shape),
                                       std::move(global_offset), std::move(replica_id));
          },
          "key"_a, "data"_a.none(), "global_shape"_a, "global_offset"_a, "replica_id"_a,
          "bridge"_a.none())
      .def_prop_ro("unique_key", &ShardedObject::unique_key);
  bind_factory(m);
  nb::class_<LocalNonpersistent>(m, "LocalNonpersistent")
      .def_static(
          "make",
          [](nb::handle value) {
            return LocalNonpersistent{std::make_shared<const StateNode>(object_node(value))};
          },
          "value"_a.none());
}

}  // namespace tilestone::python
