#include "tests/golden.h"

#include <algorithm>
#include <fstream>
#include <iterator>

namespace tilestone {

namespace fs = std::filesystem;

fs::path golden(const std::string& name) { return fs::path(TILESTONE_GOLDEN_DIR) / name; }

std::vector<fs::path> goldens() {
  std::vector<fs::path> found = all_goldens();
  std::erase_if(
      found, [](const fs::path& folder) { return folder.filename().string().starts_with("flat"); });
  return found;
}

std::vector<fs::path> all_goldens() {
  std::vector<fs::path> found;
  for (const fs::directory_entry& version : fs::directory_iterator(golden(""))) {
    if (!version.is_directory()) continue;
    for (const fs::directory_entry& entry : fs::directory_iterator(version.path())) {
      if (entry.is_directory()) found.push_back(entry.path());
    }
  }
  std::sort(found.begin(), found.end());
  return found;
}

FileImage image_of(const fs::path& folder) {
  FileImage image;
  for (const fs::directory_entry& file : fs::recursive_directory_iterator(folder)) {
    if (!file.is_regular_file()) continue;
    std::ifstream in(file.path(), std::ios::binary);
    const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    image[fs::relative(file.path(), folder).generic_string()] = to_bytes(text);
  }
  return image;
}

}  // namespace tilestone
