#include "tilestone/cli/output.h"

#include <fmt/format.h>
#include <fnmatch.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

namespace tilestone::cli {
namespace {

// A wider cell widens its own line only, so that one long key doesn't widen all.
constexpr size_t kWidestColumn = 120;
constexpr size_t kLeastColumn = 20;  // of a column that is shortened

// Approximate number of terminal columns: the number of UTF-8 code points, without colours.
size_t width(std::string_view text) {
  size_t columns = 0;
  bool in_colour = false;
  for (const char c : text) {
    if (c == '\x1b') in_colour = true;
    if (!in_colour && (static_cast<unsigned char>(c) & 0xC0) != 0x80) ++columns;
    if (c == 'm') in_colour = false;
  }
  return columns;
}

bool has_colours(std::FILE* to) {
  const char* const no_colour = std::getenv("NO_COLOR");
  if (no_colour != nullptr && *no_colour != '\0') return false;
  const char* const terminal = std::getenv("TERM");
  if (terminal != nullptr && std::string_view(terminal) == "dumb") return false;
  return isatty(fileno(to)) != 0;
}

}  // namespace

std::string coloured(std::string_view text, Colour colour, std::FILE* to) {
  if (!has_colours(to)) return std::string(text);
  static constexpr int kCodes[] = {32, 31, 33};  // green, red, yellow
  return fmt::format("\x1b[{}m{}\x1b[0m", kCodes[static_cast<size_t>(colour)], text);
}

std::string shape_text(const Dims& shape) { return to_string(shape); }

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
      if (const size_t w = width(row[i]); w <= kWidestColumn) widths[i] = std::max(widths[i], w);
    }
  }
  size_t total = 2 * (widths.size() - 1);
  for (const size_t w : widths) total += w;
  size_t first = kWidestColumn * 1000;  // of the first column
  if (limit > 0 && total > limit) {
    first = std::max(kLeastColumn, widths[0] - std::min(widths[0], total - limit));
    widths[0] = std::min(widths[0], first);
  } else if (limit > 0) {
    first = widths[0] + (limit - total);
  }
  std::string text;
  for (const auto& row : rows_) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string cell = i == 0 ? shortened(row[i], first) : row[i];
      const std::string pad(widths[i] - std::min(widths[i], width(cell)), ' ');
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
  const size_t columns = width(text);
  if (columns <= limit || limit < 5) return text;
  const size_t left = (limit - 3) / 2, right = limit - 3 - left;
  // The byte at which the character with this number begins.
  const auto at = [&](size_t number) {
    size_t i = 0;
    for (size_t seen = 0; i < text.size(); ++i) {
      if ((static_cast<unsigned char>(text[i]) & 0xC0) != 0x80 && seen++ == number) break;
    }
    return i;
  };
  return text.substr(0, at(left)) + "..." + text.substr(at(columns - right));
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

bool matches(const std::vector<std::string>& patterns, const std::string& key) {
  return patterns.empty() ||
         std::any_of(patterns.begin(), patterns.end(), [&](const std::string& pattern) {
           return fnmatch(pattern.c_str(), key.c_str(), 0) == 0;
         });
}

}  // namespace tilestone::cli
