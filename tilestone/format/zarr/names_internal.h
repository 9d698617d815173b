// Names of files and the keys, chunks and objects that they stand for. An array is a directory
// named by its key, a chunk a file in it ("KEY/0.1"), an object a file "KEY.pt". A key's slashes
// are the path's.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "tilestone/geometry/dims.h"

namespace tilestone::zarr {

inline constexpr std::string_view kArrayFile = ".zarray";
inline constexpr std::string_view kObjectSuffix = ".pt";

// Error(kInvalidArgument) naming the key, where the directory of an array of that key or the file
// of an object could not be made or would not be read back as that key: empty components, "." and
// "..", NUL, components too long for a file name, the names of files that describe checkpoints.
void check_tensor_key(const std::string& key);
void check_object_key(const std::string& key);

// "KEY/.zarray", and its inverse: nullopt for any other name.
std::string array_file(std::string_view key);
std::optional<std::string> key_of_array_file(std::string_view name);

// "KEY.pt", and its inverse. Names that describe a checkpoint (common.pt) are no objects'.
std::string object_file(std::string_view key);
std::optional<std::string> key_of_object_file(std::string_view name);

// A chunk's file below its array's directory: the index of the cell, "0" for a tensor without dims.
std::string chunk_name(const Dims& index, char separator);
// Inverse; nullopt for what is no name of a chunk of that many dims (numbers without leading zeros
// that fit an int64).
std::optional<Dims> parse_chunk_name(std::string_view name, size_t dims, char separator);
// Whether the last component of a path looks like the name of some array's chunk.
bool resembles_chunk_name(std::string_view path);

// The place of an object in its grid, as "KEY/shard_0.1_2.2" ends: offset, shape.
struct ObjectPlace {
  std::string_view key;  // "KEY"; borrowed
  Dims offset;
  Dims shape;
  // Megatron-Core up to 0.7 left the last number of a grid of 2 dims or more out: "shard_0.1_2".
  bool shape_is_cut() const { return shape.size() + 1 == offset.size(); }
};
// nullopt for keys of any other form.
std::optional<ObjectPlace> parse_object_place(std::string_view key);

}  // namespace tilestone::zarr
