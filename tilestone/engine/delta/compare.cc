#include <algorithm>
#include <tuple>
#include <utility>

#include "tilestone/engine/delta/box_crc_internal.h"
#include "tilestone/engine/delta/compare_internal.h"

namespace tilestone::engine {

std::vector<BoxesAtOnce> some_at_once(std::span<const Box> boxes, uint64_t item_bytes) {
  constexpr size_t kAtOnce = 8;
  std::vector<BoxesAtOnce> found;
  uint64_t begin = 0;
  for (size_t first = 0; first < boxes.size(); first += kAtOnce) {
    BoxesAtOnce some{boxes.subspan(first, std::min(kAtOnce, boxes.size() - first)), begin};
    for (const Box& box : some.boxes) some.size += static_cast<uint64_t>(box.numel()) * item_bytes;
    begin += some.size;
    found.push_back(some);
  }
  return found;
}

std::vector<ComparedPiece> compare_pieces(const DeltaTensor& tensor, std::span<const Box> boxes,
                                          ByteView base, ByteView now, bool sum_base,
                                          ThreadPool& threads) {
  const uint64_t item = itemsize(tensor.dtype);
  std::vector<ComparedPiece> pieces;
  std::vector<ByteView> old;
  uint64_t at = 0;
  for (const Box& box : boxes) {
    const uint64_t size = static_cast<uint64_t>(box.numel()) * item;
    const auto part = [&](ByteView of) { return of.empty() ? of : of.subspan(at, size); };
    pieces.push_back({.box = box, .now = part(now), .encoded = std::nullopt});
    old.push_back(part(base));
    at += size;
  }
  threads.parallel_for(pieces.size(), [&](size_t i) {
    ComparedPiece& piece = pieces[i];
    const auto portion = [&](ByteView elements) {
      return crc_portion(elements, piece.box, tensor.shape, item);
    };
    if (!base.empty() && sum_base) piece.before = portion(old[i]);
    if (now.empty()) return;
    piece.after = portion(piece.now);
    piece.encoded = base.empty() ? EncodedPiece{} : encode_piece(old[i], piece.now, item);
  });
  return pieces;
}

DeltaIndex make_index(std::vector<DeltaTensor> tensors) {
  std::sort(tensors.begin(), tensors.end(), [](const DeltaTensor& a, const DeltaTensor& b) {
    return std::pair(std::string_view(a.key), a.after.has_value()) <
           std::pair(std::string_view(b.key), b.after.has_value());
  });
  DeltaIndex index;
  index.tensors = std::move(tensors);
  index.base = state_id(sums_before(index));
  index.result = state_id(sums_after(index));
  return index;
}

DeltaReport report_of(const DeltaIndex& index) {
  DeltaReport report;
  report.base = index.base;
  report.result = index.result;
  for (const DeltaTensor& tensor : index.tensors) {
    if (tensor.removed()) {
      ++report.removed;
      continue;
    }
    report.whole_bytes += tensor.bytes();
    if (tensor.unchanged()) {
      ++report.unchanged;
    } else {
      ++(tensor.before ? report.changed : report.added);
    }
  }
  return report;
}

}  // namespace tilestone::engine
