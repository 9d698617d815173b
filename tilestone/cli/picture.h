// Draws with characters how a tensor is divided into chunks.
#pragma once

#include <string>
#include <vector>

#include "tilestone/tilestone.h"

namespace tilestone::cli {

// One line of text per drawn row. The two dims with the most cuts are drawn; a 1-D tensor has one
// row. Other dims are shown at the offset of chunks[0]. Each cell shows the letter of the chunk
// that has the cell's middle element: 'A' is chunks[0]; after 'Z' come 'a' to 'z' and '0' to '9',
// then 'A' again. '.' means no chunk.
struct Picture {
  std::vector<std::string> lines;
  int row_dim = -1;     // the dim drawn downwards; -1: none
  int column_dim = -1;  // the dim drawn to the right; -1: none (a scalar)
};
Picture draw_chunks(const StoredTensor& tensor, size_t max_columns = 64, size_t max_rows = 16);

// The letter of the chunk with this index.
char chunk_letter(size_t index);

}  // namespace tilestone::cli
