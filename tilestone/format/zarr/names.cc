#include <algorithm>
#include <array>

#include "tilestone/base/error.h"
#include "tilestone/base/number_text.h"
#include "tilestone/format/zarr/names_internal.h"

namespace tilestone::zarr {
namespace {

constexpr size_t kMaxComponent = 255;  // bytes; the limit of all common file systems

constexpr std::array<std::string_view, 9> kReserved{".zarray",       ".zattrs",   ".zgroup",
                                                    ".zmetadata",    "zarr.json", "common.pt",
                                                    "metadata.json", ".metadata", ".tilestone"};

bool is_reserved(std::string_view component) {
  return std::find(kReserved.begin(), kReserved.end(), component) != kReserved.end();
}

std::string_view last_component(std::string_view path) {
  return path.substr(path.rfind('/') + 1);  // npos + 1 is 0
}

[[noreturn]] void refuse(const std::string& key, const std::string& why) {
  throw Error(ErrorCode::kInvalidArgument,
              "the key \"" + key + "\" can't name a file of a zarr checkpoint: " + why)
      .with_key(key)
      .with_hint("rename the entry, or save in the torch_dist format");
}

void check_component(const std::string& key, std::string_view component, size_t suffix) {
  if (component.empty()) refuse(key, "a part between slashes is empty");
  if (component == "." || component == "..") {
    refuse(key, "\"" + std::string(component) + "\" names a directory");
  }
  if (is_reserved(component)) {
    refuse(key,
           "\"" + std::string(component) + "\" is the name of a file that describes a checkpoint");
  }
  if (component.size() + suffix > kMaxComponent) {
    refuse(key, "a part of its path has " + std::to_string(component.size() + suffix) +
                    " bytes; a file name has at most " + std::to_string(kMaxComponent));
  }
}

// `suffix`: the bytes that will be appended to the last component.
void check_key(const std::string& key, size_t suffix) {
  if (key.find('\0') != std::string::npos) refuse(key, "it contains a NUL character");
  for (size_t begin = 0; begin <= key.size();) {
    const size_t end = std::min(key.find('/', begin), key.size());
    check_component(key, std::string_view(key).substr(begin, end - begin),
                    end == key.size() ? suffix : 0);
    begin = end + 1;
  }
}

// Parses an integer without sign and leading zeros.
std::optional<int64_t> parse_number(std::string_view text) {
  if (text.empty() || (text.size() > 1 && text[0] == '0') || text[0] == '-') return std::nullopt;
  return number_in<int64_t>(text);
}

std::optional<Dims> parse_numbers(std::string_view text, char separator) {
  Dims numbers;
  while (true) {
    const size_t end = std::min(text.find(separator), text.size());
    const auto number = parse_number(text.substr(0, end));
    if (!number) return std::nullopt;
    numbers.push_back(*number);
    if (end == text.size()) return numbers;
    text.remove_prefix(end + 1);
  }
}

}  // namespace

void check_tensor_key(const std::string& key) { check_key(key, 0); }

void check_object_key(const std::string& key) {
  check_key(key, kObjectSuffix.size());
  if (is_reserved(last_component(object_file(key)))) {
    refuse(key, "its file name would be \"" + object_file(key) +
                    "\", the name of a file that describes a checkpoint");
  }
  const auto cell = parse_object_cell(key);
  if (cell && cell->shape_is_cut()) {
    refuse(key,
           "it would be read as the name that Megatron-Core up to 0.7 gave to an object in a "
           "grid of " +
               std::to_string(cell->offset.size()) + " dims");
  }
}

std::string array_file(std::string_view key) {
  return std::string(key) + "/" + std::string(kArrayFile);
}

std::optional<std::string> key_of_array_file(std::string_view name) {
  const size_t suffix = kArrayFile.size() + 1;
  if (name.size() <= suffix || last_component(name) != kArrayFile) return std::nullopt;
  return std::string(name.substr(0, name.size() - suffix));
}

std::string object_file(std::string_view key) {
  return std::string(key) + std::string(kObjectSuffix);
}

std::optional<std::string> key_of_object_file(std::string_view name) {
  const std::string_view last = last_component(name);
  if (last.size() <= kObjectSuffix.size() || !last.ends_with(kObjectSuffix) || is_reserved(last)) {
    return std::nullopt;
  }
  return std::string(name.substr(0, name.size() - kObjectSuffix.size()));
}

std::string chunk_name(const Dims& index, char separator) {
  if (index.empty()) return "0";
  std::string name;
  for (const int64_t number : index) {
    if (!name.empty()) name += separator;
    name += std::to_string(number);
  }
  return name;
}

std::optional<Dims> parse_chunk_name(std::string_view name, size_t dims, char separator) {
  if (dims == 0) return name == "0" ? std::optional<Dims>(Dims()) : std::nullopt;
  auto index = parse_numbers(name, separator);
  return index && index->size() == dims ? index : std::nullopt;
}

bool resembles_chunk_name(std::string_view path) {
  return parse_numbers(last_component(path), '.').has_value();
}

std::optional<ObjectCell> parse_object_cell(std::string_view key) {
  constexpr std::string_view kShard = "shard_";
  const std::string_view last = last_component(key);
  if (last.size() == key.size() || !last.starts_with(kShard)) return std::nullopt;
  const std::string_view numbers = last.substr(kShard.size());
  const size_t middle = numbers.find('_');
  if (middle == std::string_view::npos) return std::nullopt;
  const auto offset = parse_numbers(numbers.substr(0, middle), '.');
  const auto shape = parse_numbers(numbers.substr(middle + 1), '.');
  if (!offset || !shape) return std::nullopt;
  if (shape->size() != offset->size() && shape->size() + 1 != offset->size()) return std::nullopt;
  return ObjectCell{key.substr(0, key.size() - last.size() - 1), *offset, *shape};
}

}  // namespace tilestone::zarr
