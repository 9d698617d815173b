// How a tensor's chunks lie in it, drawn with characters.
#pragma once

#include <string>
#include <vector>

#include "tilestone/tilestone.h"

namespace tilestone::cli {

// One line of text per drawn row. Two dims are drawn (the two with the most cuts; one row for a
// 1-D tensor); other dims are taken at their first chunk. Each cell shows the letter of the chunk
// that holds the cell's middle element: 'A' is chunks[0], after 'Z' come 'a' to 'z' and '0' to
// '9', then they start again. '.' is held by no chunk.
struct Picture {
  std::vector<std::string> lines;
  int row_dim = -1;     // drawn downwards; -1: none
  int column_dim = -1;  // drawn to the right; -1: none (a scalar)
};
Picture draw_chunks(const StoredTensor& tensor, size_t max_columns = 64, size_t max_rows = 16);

// The letter of the chunk with this index.
char chunk_letter(size_t index);

}  // namespace tilestone::cli
