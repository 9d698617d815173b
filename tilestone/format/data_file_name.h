// The names of the data files that saves make. They are the same in every format whose items share
// files; formats with a file for each item (zarr) have none.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace tilestone {

// The save id, then the name that stock writers use. The save id distinguishes the files of
// different saves. Stock readers take the names from the metadata. `index`: counts the rank's
// files.
std::string data_file_name(std::string_view save_id, int rank, int index);

struct DataFileName {
  std::string save_id;
  int rank = 0;
  int index = 0;
};
// The reverse; nullopt for any other name. Stock writers' names parse, too, with what stands before
// the rank for the save id.
std::optional<DataFileName> parse_data_file_name(std::string_view name);

}  // namespace tilestone
