// Converts between file names and keys, chunks and objects. An array is a directory named by its
// key, a chunk is a file in it ("KEY/0.1"), and an object is a file "KEY.pt". A slash in a key is a
// slash in the path.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "tilestone/geometry/box.h"

namespace tilestone::zarr {

inline constexpr std::string_view kArrayFile = ".zarray";
inline constexpr std::string_view kObjectSuffix = ".pt";

// Error(kInvalidArgument), naming the key, if the array's directory or the object's file could not
// be created, or would not be read back as that key. Refused are empty components, "." and "..",
// NUL, components too long for a file name, and the names of files that describe checkpoints.
void check_tensor_key(const std::string& key);
void check_object_key(const std::string& key);

// "KEY/.zarray", and its inverse: nullopt for any other name.
std::string array_file(std::string_view key);
std::optional<std::string> key_of_array_file(std::string_view name);

// "KEY.pt", and its inverse: nullopt for any other name, and for common.pt, which describes a
// checkpoint.
std::string object_file(std::string_view key);
std::optional<std::string> key_of_object_file(std::string_view name);

// A chunk's file name in its array's directory: the cell's index, or "0" for a tensor without dims.
std::string chunk_name(const Dims& index, char separator);
// The inverse. nullopt if the name is not that of a chunk with `dims` dims: that many numbers
// without leading zeros, each of which fits an int64.
std::optional<Dims> parse_chunk_name(std::string_view name, size_t dims, char separator);
// Whether the last component of the path looks like a chunk's name.
bool resembles_chunk_name(std::string_view path);

// The cell of an object in its grid, from a key such as "KEY/shard_0.1_2.2".
struct ObjectCell {
  std::string_view key;  // "KEY"; borrowed
  Dims offset;
  Dims shape;  // of the grid
  // Megatron-Core up to 0.7 omitted the last number of the shape in grids of 2 or more dims:
  // "shard_0.1_2".
  bool shape_is_cut() const { return shape.size() + 1 == offset.size(); }
};
// nullopt for keys of any other form. Borrows `key`.
std::optional<ObjectCell> parse_object_cell(std::string_view key);

}  // namespace tilestone::zarr
