#include "tests/random_layout.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "tilestone/geometry/strided_copy_testing.h"

namespace tilestone::tests {
namespace {

int64_t below(Random& random, int64_t n) {
  return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
}

// Memory for a shard of `shape`, with transposed strides if `strided`.
TensorView memory(DType dtype, const Dims& shape, bool strided) {
  if (!strided || shape.size() < 2) return TensorView::allocate(dtype, shape);
  Dims reversed = shape;
  std::reverse(reversed.begin(), reversed.end());
  TensorView view = TensorView::allocate(dtype, reversed);
  std::reverse(view.shape.begin(), view.shape.end());
  std::reverse(view.strides.begin(), view.strides.end());
  return view;
}

class Layout {
 public:
  Layout(const Reference& reference, Random random, int rank, int world, Fill fill)
      : reference_(reference), random_(random), rank_(rank), world_(world), fill_(fill) {}

  std::vector<ShardedTensor> make(LayoutKind kind) {
    switch (kind) {
      case LayoutKind::kGrid:
        return grid();
      case LayoutKind::kIrregular:
        return irregular();
      case LayoutKind::kFlat:
        return flat();
      case LayoutKind::kPlacements:
        return placements();
      case LayoutKind::kPrepended:
        return prepended();
      case LayoutKind::kReplicated:
        return replicated();
    }
    return {};
  }

 private:
  const Dims& shape() const { return reference_.all.shape; }
  DType dtype() const { return reference_.all.dtype; }

  // A shard's memory. It holds the reference's elements of `box` if `fill_` is kData.
  TensorView shard(const Box& box, const Dims& local_shape) {
    if (fill_ == Fill::kNone) return TensorView::without_data(dtype(), local_shape);
    const TensorView data = memory(dtype(), local_shape, random_() % 4 == 0);
    if (fill_ == Fill::kData && !box.empty()) {
      const Bytes bytes = bytes_of(reference_.all.narrow(box));
      unpack_range(data.strided_view(), 0, bytes);
    }
    return data;
  }

  std::vector<int> all_ranks() const {
    std::vector<int> ranks(static_cast<size_t>(world_));
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }

  std::vector<ShardedTensor> replicated() {
    const Box box = Box::whole(shape());
    auto tensor =
        ShardedTensor::from_box(reference_.key, shard(box, shape()), shape(), box, {rank_});
    tensor.declare_replicas(all_ranks());
    return {tensor};
  }

  // A regular grid along one axis; the remaining ranks hold replicas.
  std::vector<ShardedTensor> grid() {
    std::vector<std::pair<int64_t, int64_t>> choices;  // axis, fragments
    for (size_t axis = 0; axis < shape().size(); ++axis) {
      for (int64_t fragments = 1; fragments <= world_; ++fragments) {
        if (shape()[axis] % fragments == 0 && world_ % fragments == 0) {
          choices.emplace_back(axis, fragments);
        }
      }
    }
    if (choices.empty()) return replicated();
    const auto [axis, fragments] =
        choices[static_cast<size_t>(below(random_, static_cast<int64_t>(choices.size())))];
    Box box = Box::whole(shape());
    const int64_t cell = rank_ % fragments;
    box.shape[static_cast<size_t>(axis)] /= fragments;
    box.offset[static_cast<size_t>(axis)] = cell * box.shape[static_cast<size_t>(axis)];
    return {ShardedTensor::from_rank_offsets(reference_.key, shard(box, box.shape),
                                             {{axis, cell, fragments}}, {rank_ / fragments})};
  }

  // Boxes made by cutting the tensor at random places; one to three ranks hold each box.
  std::vector<ShardedTensor> irregular() {
    std::vector<Box> boxes{Box::whole(shape())};
    const int64_t cuts = shape().empty() ? 0 : below(random_, 8);
    for (int64_t i = 0; i < cuts; ++i) {
      Box& box = boxes[static_cast<size_t>(below(random_, static_cast<int64_t>(boxes.size())))];
      const auto dim = static_cast<size_t>(below(random_, static_cast<int64_t>(shape().size())));
      const int64_t first = below(random_, box.shape[dim] + 1);  // empty boxes included
      Box rest = box;
      box.shape[dim] = first;
      rest.offset[dim] += first;
      rest.shape[dim] -= first;
      boxes.push_back(rest);
    }
    std::vector<ShardedTensor> mine;
    for (const Box& box : boxes) {
      std::vector<int> holders = all_ranks();
      std::shuffle(holders.begin(), holders.end(), random_);
      holders.resize(std::min<size_t>(holders.size(), 1 + random_() % 3));
      const bool declared = random_() % 2 == 0;
      Random own = random_;
      const auto found = std::find(holders.begin(), holders.end(), rank_);
      if (found == holders.end()) continue;
      mine.push_back(ShardedTensor::from_box(reference_.key, shard(box, box.shape), shape(), box,
                                             {found - holders.begin()}));
      random_ = own;
      if (declared) mine.back().declare_replicas(holders);
    }
    return mine;
  }

  // Slices of the flattened tensor, cut at random places; some may be empty.
  std::vector<ShardedTensor> flat() {
    const int64_t total = numel(shape());
    std::vector<int64_t> cuts{0, total};
    for (int i = 1; i < world_; ++i) cuts.push_back(below(random_, total + 1));
    std::sort(cuts.begin(), cuts.end());
    const FlatRange range{cuts[static_cast<size_t>(rank_)], cuts[static_cast<size_t>(rank_) + 1]};
    const int64_t count = range.end - range.begin;
    TensorView data = fill_ == Fill::kNone ? TensorView::without_data(dtype(), {count})
                                           : TensorView::allocate(dtype(), {count});
    if (fill_ == Fill::kData && count > 0) {
      const Bytes all = bytes_of(reference_.all);
      const uint64_t size = itemsize(dtype());
      std::memcpy(data.data, all.data() + static_cast<uint64_t>(range.begin) * size,
                  static_cast<uint64_t>(count) * size);
    }
    return {ShardedTensor::from_rank_offsets_flat(reference_.key, data, shape(), range, {})};
  }

  std::vector<ShardedTensor> placements() {
    int64_t outer = 1;
    for (int64_t n = 2; n <= world_; ++n) {
      if (world_ % n == 0 && random_() % 2 == 0) outer = n;
    }
    const Mesh mesh = Mesh::grid({outer, world_ / outer});
    std::vector<Placement> chosen;
    for (int d = 0; d < 2; ++d) {
      if (shape().empty() || random_() % 3 == 0) {
        chosen.push_back(Replicate{});
      } else {
        chosen.push_back(Shard{below(random_, static_cast<int64_t>(shape().size()))});
      }
    }
    const LocalBoxes held = local_boxes(shape(), mesh, *mesh.coordinate(rank_), chosen);
    TensorView local = fill_ == Fill::kNone ? TensorView::without_data(dtype(), held.local_shape)
                                            : TensorView::allocate(dtype(), held.local_shape);
    for (size_t i = 0; i < held.boxes.size() && fill_ == Fill::kData; ++i) {
      if (held.boxes[i].empty()) continue;
      strided_copy(local.narrow(held.locals[i]).strided_view(),
                   reference_.all.narrow(held.boxes[i]).strided_view());
    }
    return {ShardedTensor::from_placements(reference_.key, local, shape(), mesh, chosen, rank_)};
  }

  // Slices along axis 0 without that axis: layers of one stacked tensor, distributed to the ranks.
  std::vector<ShardedTensor> prepended() {
    if (shape().empty() || shape()[0] == 0) return replicated();
    std::vector<ShardedTensor> mine;
    for (int64_t layer = 0; layer < shape()[0]; ++layer) {
      const auto owner = static_cast<int>(below(random_, world_));
      if (owner != rank_) continue;
      Random own = random_;
      Box box = Box::whole(shape());
      box.offset[0] = layer;
      box.shape[0] = 1;
      const Dims local(shape().span().subspan(1));
      mine.push_back(ShardedTensor::from_rank_offsets(reference_.key, shard(box, local),
                                                      {{0, layer, shape()[0]}}, {}, 1));
      random_ = own;
    }
    return mine;
  }

  const Reference& reference_;
  Random random_;
  const int rank_;
  const int world_;
  const Fill fill_;
};

}  // namespace

Reference random_tensor(const std::string& key, Random& random) {
  const auto dtypes = all_dtypes();
  const DType dtype = dtypes[random() % dtypes.size()];
  Dims shape;
  for (size_t dims = random() % 5; dims > 0; --dims) {
    const bool zero = random() % 20 == 0;
    shape.push_back(zero ? 0 : 1 + below(random, random() % 3 == 0 ? 24 : 6));
  }
  TensorView all = TensorView::allocate(dtype, shape);
  for (uint64_t i = 0; i < all.bytes(); ++i) all.data[i] = static_cast<std::byte>(random());
  return {key, all};
}

LayoutKind random_kind(Random& random) {
  constexpr LayoutKind kAll[] = {LayoutKind::kGrid,      LayoutKind::kIrregular,
                                 LayoutKind::kFlat,      LayoutKind::kPlacements,
                                 LayoutKind::kPrepended, LayoutKind::kReplicated};
  return kAll[random() % std::size(kAll)];
}

std::vector<ShardedTensor> random_layout(const Reference& reference, LayoutKind kind, Random random,
                                         int rank, int world, Fill fill) {
  return Layout(reference, random, rank, world, fill).make(kind);
}

Bytes bytes_of(const TensorView& tensor) {
  Bytes out(tensor.bytes());
  if (!out.empty()) pack_range(tensor.strided_view(), 0, out);
  return out;
}

}  // namespace tilestone::tests
