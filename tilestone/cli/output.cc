#include "tilestone/cli/output.h"

#include <fmt/format.h>
#include <fnmatch.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <span>
#include <system_error>
#include <utility>

namespace tilestone::cli {
namespace {

// A wider cell widens its own line only, so that one long key doesn't widen all.
constexpr size_t kWidestColumn = 120;
constexpr size_t kLeastColumn = 12;  // of a column that is shortened

// Takes the first character, or a byte that begins none.
void take_character(std::string_view& text) {
  text.remove_prefix(std::max<size_t>(first_code_point(text).size, 1));
}

bool has_colours(std::FILE* to) {
  const char* const no_colour = std::getenv("NO_COLOR");
  if (no_colour != nullptr && *no_colour != '\0') return false;
  const char* const terminal = std::getenv("TERM");
  if (terminal != nullptr && std::string_view(terminal) == "dumb") return false;
  return isatty(fileno(to)) != 0;
}

}  // namespace

size_t width_of(std::string_view text) {
  size_t columns = 0;
  while (!text.empty()) {
    if (text.front() == '\x1b') {
      text.remove_prefix(std::min(text.find('m'), text.size() - 1) + 1);
    } else {
      take_character(text);
      ++columns;
    }
  }
  return columns;
}

std::string key_text(const std::string& key) { return key.empty() ? "\"\"" : printable(key); }

std::string coloured(std::string_view text, Colour colour, std::FILE* to) {
  if (!has_colours(to)) return std::string(text);
  static constexpr int kCodes[] = {32, 31, 33};  // green, red, yellow
  return fmt::format("\x1b[{}m{}\x1b[0m", kCodes[static_cast<size_t>(colour)], text);
}

std::string shape_text(const Dims& shape) { return to_string(shape); }

void for_each_item(const Metadata& metadata,
                   const std::function<void(const std::string& key, const ItemLocation& at,
                                            bool is_object)>& visit) {
  for (const StoredTensor& tensor : metadata.tensors) {
    for (uint32_t c = 0; c < tensor.chunks.size(); ++c) {
      if (tensor.first_of_item(c) == c) visit(tensor.key, tensor.chunks[c].at, false);
    }
  }
  for (const StoredCopy& copy : metadata.copies) {
    visit(metadata.tensors[copy.tensor].key, copy.at, false);
  }
  for (const StoredObject& object : metadata.objects) {
    visit(object.key, object.at, true);
    for (const ItemLocation& copy : object.copies) visit(object.key, copy, true);
    for (const ItemLocation& copy : object.unlike) visit(object.key, copy, true);
  }
}

uint64_t copy_bytes(const Metadata& metadata) {
  uint64_t bytes = 0;
  for (const StoredCopy& copy : metadata.copies) {
    const StoredTensor& tensor = metadata.tensors[copy.tensor];
    bytes += static_cast<uint64_t>(tensor.chunks[copy.chunk].box.numel()) * itemsize(tensor.dtype);
  }
  for (const StoredObject& object : metadata.objects) {
    for (const ItemLocation& copy : object.copies) bytes += copy.length;
  }
  return bytes;
}

uint64_t copies_in(const Metadata& metadata) {
  uint64_t copies = metadata.copies.size();
  for (const StoredObject& object : metadata.objects) copies += object.copies.size();
  return copies;
}

Table::Table(std::vector<std::string> header, std::string alignment)
    : alignment_(std::move(alignment)) {
  rows_.push_back(std::move(header));
}

void Table::add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }

std::string Table::text(size_t limit) const {
  std::vector<size_t> widths(alignment_.size(), 0);
  for (const auto& row : rows_) {
    for (size_t i = 0; i < row.size(); ++i) {
      if (const size_t w = width_of(row[i]); w <= kWidestColumn) widths[i] = std::max(widths[i], w);
    }
  }
  size_t total = 2 * (widths.size() - 1);
  for (const size_t w : widths) total += w;
  std::vector<size_t> limits(widths.size(), SIZE_MAX);  // of the columns' cells
  for (const size_t i : shortened_) {
    if (limit == 0) break;
    const size_t before = widths[i];
    if (total > limit) {
      limits[i] = std::max(kLeastColumn, before - std::min(before, total - limit));
      widths[i] = std::min(before, limits[i]);
    } else {
      limits[i] = before + (limit - total);  // a cell that is wider than the others
    }
    total -= before - widths[i];
  }
  std::string text;
  for (const auto& row : rows_) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string cell = shortened(row[i], limits[i]);
      const std::string pad(widths[i] - std::min(widths[i], width_of(cell)), ' ');
      if (i > 0) line += "  ";
      line += alignment_[i] == 'r' ? pad + cell : cell + pad;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  }
  return text;
}

void Table::print(bool wide) const {
  const std::string lines = text(wide ? 0 : terminal_width());
  std::fwrite(lines.data(), 1, lines.size(), stdout);
}

std::string shortened(const std::string& text, size_t limit) {
  const size_t columns = width_of(text);
  if (columns <= limit || limit < 5) return text;
  const size_t left = (limit - 3) / 2, right = limit - 3 - left;
  std::string_view rest = text;
  for (size_t i = 0; i < left; ++i) take_character(rest);
  const size_t begin = text.size() - rest.size();  // where the left part ends
  for (size_t i = left; i < columns - right; ++i) take_character(rest);
  return text.substr(0, begin) + "..." + std::string(rest);
}

size_t terminal_width() {
  winsize size{};
  if (isatty(STDOUT_FILENO) == 0) return 0;
  const bool known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : 80;
}

ProgressFn progress_line() {
  if (isatty(STDERR_FILENO) == 0) return nullptr;
  return [](const Progress& p) {
    const double rate = p.seconds > 0 ? static_cast<double>(p.bytes_done) / p.seconds : 0;
    const bool done = p.bytes_done >= p.bytes_total;
    const double left = rate > 0 ? static_cast<double>(p.bytes_total - p.bytes_done) / rate : 0;
    const double percent = p.bytes_total > 0 ? 100.0 * static_cast<double>(p.bytes_done) /
                                                   static_cast<double>(p.bytes_total)
                                             : 100.0;
    fmt::print(stderr, "\r{} {:3.0f} %  {} of {}  {}/s  {}\033[K{}", p.phase, percent,
               human_bytes(p.bytes_done), human_bytes(p.bytes_total),
               human_bytes(static_cast<uint64_t>(rate)),
               done ? fmt::format("in {:.1f} s", p.seconds) : fmt::format("{:.0f} s left", left),
               done ? "\n" : "");
    std::fflush(stderr);
  };
}

void write_file(const std::string& path, std::initializer_list<std::string_view> parts) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  const bool is_open = file.is_open();
  for (const std::string_view part : parts) {
    file.write(part.data(), static_cast<std::streamsize>(part.size()));
  }
  file.close();
  if (file) return;
  const int error = errno;
  std::error_code none;
  const bool is_link = std::filesystem::is_symlink(path, none);  // as /dev/stdout may be
  if (is_open && !is_link && std::filesystem::is_regular_file(path, none)) {
    std::filesystem::remove(path, none);
  }
  throw Error(ErrorCode::kIo, "cannot write the file").with_file(path).with_errno(error);
}

bool matches(const std::vector<std::string>& patterns, const std::string& key) {
  return patterns.empty() ||
         std::any_of(patterns.begin(), patterns.end(), [&](const std::string& pattern) {
           return fnmatch(pattern.c_str(), key.c_str(), 0) == 0;
         });
}

nlohmann::ordered_json json_value(const Value& value) {
  switch (value.kind()) {
    case Value::Kind::kNull:
      return nullptr;
    case Value::Kind::kBool:
      return value.as_bool();
    case Value::Kind::kInt:
      return value.as_int();
    case Value::Kind::kFloat:
      if (std::isfinite(value.as_float())) return value.as_float();
      break;
    case Value::Kind::kString:
      return value.as_string();
    case Value::Kind::kList:
    case Value::Kind::kTuple: {
      auto out = nlohmann::ordered_json::array();
      for (const Value& item : value.items()) out.push_back(json_value(item));
      return out;
    }
    case Value::Kind::kDict: {
      auto out = nlohmann::ordered_json::object();
      for (const auto& [key, item] : value.as_dict()) {
        out[key.kind() == Value::Kind::kString ? key.as_string() : to_string(key)] =
            json_value(item);
      }
      return out;
    }
    case Value::Kind::kTensor:
      return {{"dtype", to_string(value.as_tensor().dtype)},
              {"shape", value.as_tensor().shape.span()}};
    default:
      break;
  }
  return to_string(value, SIZE_MAX);
}

void print_json(const nlohmann::ordered_json& json, int indent) {
  fmt::print("{}\n", json.dump(indent, ' ', false, nlohmann::json::error_handler_t::replace));
}

}  // namespace tilestone::cli
