#include "tests/golden.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <regex>

#include "tilestone/base/checksum.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone {

namespace fs = std::filesystem;

fs::path golden(const std::string& name) { return fs::path(TILESTONE_GOLDEN_DIR) / name; }

std::vector<fs::path> goldens() {
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

namespace {

std::string joined(const Value::List& items) {
  std::string text;
  for (const Value& item : items) text += (text.empty() ? "" : ", ") + golden_text(item);
  return text;
}

std::string opaque_text(const Opaque& opaque) {
  if (opaque.name == "BytesIO") return "BytesIO " + to_string(opaque.state.items().at(0));
  if (opaque.kind != Opaque::Kind::kNew) {
    return "<" + opaque.name.substr(0, opaque.name.find('.')) + ">";
  }
  std::string text;
  for (const auto& [name, field] : opaque.state.as_dict()) {
    const std::string shown =
        field.kind() == Value::Kind::kOpaque ? opaque_text(field.as_opaque()) : to_string(field);
    text += (text.empty() ? "" : ", ") + name.as_string() + "=" + shown;
  }
  return opaque.name + "(" + text + ")";
}

}  // namespace

std::string golden_text(const Value& value) {
  switch (value.kind()) {
    case Value::Kind::kList:
      return "list(" + joined(value.items()) + ")";
    case Value::Kind::kTuple:
      return "tuple(" + joined(value.items()) + ")";
    case Value::Kind::kDict: {
      std::string text;
      for (const auto& [key, item] : value.as_dict()) {
        text += (text.empty() ? "" : ", ") + to_string(key) + ": " + golden_text(item);
      }
      return "{" + text + "}";
    }
    case Value::Kind::kTensor: {
      const TensorView& tensor = value.as_tensor();
      Bytes bytes(tensor.bytes());
      if (!bytes.empty()) pack_range(tensor.strided_view(), 0, bytes);
      return "tensor " + std::string(to_string(tensor.dtype)) + " " + to_string(tensor.shape) +
             " crc32=" + std::to_string(crc32(bytes));
    }
    case Value::Kind::kOpaque:
      return opaque_text(value.as_opaque());
    default:
      return to_string(value, SIZE_MAX);
  }
}

std::string without_enum_members(const std::string& text) {
  static const std::regex member("<([A-Za-z_]+)\\.[A-Za-z_]+: [0-9]+>");
  return std::regex_replace(text, member, "<$1>");
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
