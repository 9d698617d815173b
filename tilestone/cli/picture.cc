#include "tilestone/cli/picture.h"

#include <algorithm>
#include <set>

namespace tilestone::cli {
namespace {

constexpr std::string_view kLetters =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";

// For each dim, the number of distinct offsets at which chunks begin.
std::vector<size_t> cuts_by_dim(const StoredTensor& tensor) {
  std::vector<size_t> cuts;
  for (size_t d = 0; d < tensor.shape.size(); ++d) {
    std::set<int64_t> starts;
    for (const StoredChunk& chunk : tensor.chunks) starts.insert(chunk.box.offset[d]);
    cuts.push_back(starts.size());
  }
  return cuts;
}

// The dims to draw, in ascending order: those with the most cuts; on a tie, later dims.
std::vector<int> dims_to_draw(const StoredTensor& tensor) {
  const std::vector<size_t> cuts = cuts_by_dim(tensor);
  std::vector<int> dims;
  for (int d = static_cast<int>(cuts.size()) - 1; d >= 0; --d) dims.push_back(d);
  std::stable_sort(dims.begin(), dims.end(), [&](int a, int b) {
    return cuts[static_cast<size_t>(a)] > cuts[static_cast<size_t>(b)];
  });
  if (dims.size() > 2) dims.resize(2);
  std::sort(dims.begin(), dims.end());
  return dims;
}

char letter_at(const StoredTensor& tensor, const Dims& element) {
  const Box point{element, Dims(element.size(), 1)};
  for (size_t i = 0; i < tensor.chunks.size(); ++i) {
    if (intersect(tensor.chunks[i].box, point)) return chunk_letter(i);
  }
  return '.';
}

// The middle element of cell `index` of `cells` over `size` elements.
int64_t middle(size_t index, size_t cells, int64_t size) {
  const auto position =
      (static_cast<double>(index) + 0.5) * static_cast<double>(size) / static_cast<double>(cells);
  return std::min(size - 1, static_cast<int64_t>(position));
}

}  // namespace

char chunk_letter(size_t index) { return kLetters[index % kLetters.size()]; }

Picture draw_chunks(const StoredTensor& tensor, size_t max_columns, size_t max_rows) {
  Picture picture;
  if (tensor.chunks.empty() || numel(tensor.shape) == 0) return picture;
  const std::vector<int> dims = dims_to_draw(tensor);
  if (!dims.empty()) picture.column_dim = dims.back();
  if (dims.size() == 2) picture.row_dim = dims.front();
  const auto cells = [&](int dim, size_t most) {
    if (dim < 0) return size_t{1};
    return std::min(most, static_cast<size_t>(tensor.shape[static_cast<size_t>(dim)]));
  };
  const size_t columns = cells(picture.column_dim, max_columns);
  const size_t rows = cells(picture.row_dim, max_rows);
  const auto set = [&](Dims& element, int dim, size_t index, size_t count) {
    if (dim < 0) return;
    const auto d = static_cast<size_t>(dim);
    element[d] = middle(index, count, tensor.shape[d]);
  };
  for (size_t row = 0; row < rows; ++row) {
    std::string line;
    for (size_t column = 0; column < columns; ++column) {
      Dims element = tensor.chunks.front().box.offset;
      set(element, picture.row_dim, row, rows);
      set(element, picture.column_dim, column, columns);
      line += letter_at(tensor, element);
    }
    picture.lines.push_back(std::move(line));
  }
  return picture;
}

}  // namespace tilestone::cli
