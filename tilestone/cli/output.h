// How the subcommands print.
#pragma once

#include <cstdio>
#include <functional>
#include <initializer_list>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tilestone/base/printable.h"
#include "tilestone/base/size_text.h"
#include "tilestone/tilestone.h"

namespace tilestone::cli {

// The text in colour if `to` is a terminal that has colours, unless the environment variable
// NO_COLOR is set and not empty (no-color.org).
enum class Colour : uint8_t { kGood, kBad, kNeedsCare };
std::string coloured(std::string_view text, Colour colour, std::FILE* to = stdout);

// "[4, 8]".
std::string shape_text(const Dims& shape);

// Calls visit(key, at, is_object) for each item in the checkpoint's files, copies too.
void for_each_item(const Metadata& metadata,
                   const std::function<void(const std::string& key, const ItemLocation& at,
                                            bool is_object)>& visit);
// The number of copies of chunks and objects, and the bytes of their elements and items.
uint64_t copies_in(const Metadata& metadata);
uint64_t copy_bytes(const Metadata& metadata);

// A value as JSON. What JSON lacks becomes text: bytes, objects of classes, NaN, ints beyond 64
// bits. Values that were read are not deeper than the reader allows.
nlohmann::ordered_json json_value(const Value& value);

// Prints a line, or with an indent several. Text that is not UTF-8 is replaced.
void print_json(const nlohmann::ordered_json& json, int indent = 2);

// A table whose columns are padded to their widest cell. `alignment` has 'l' or 'r' per column.
class Table {
 public:
  Table(std::vector<std::string> header, std::string alignment);
  void add(std::vector<std::string> row);
  // The columns that are shortened if lines are too long, the first of them first; by default
  // column 0.
  void shorten(std::vector<size_t> columns) { shortened_ = std::move(columns); }
  // Prints to standard output. On a terminal, columns are shortened so that the lines fit its
  // width, unless `wide`.
  void print(bool wide = false) const;
  // The lines, of at most `width` columns (0: any number) as far as shortening allows, which leaves
  // kLeastColumn of a column.
  std::string text(size_t width) const;

 private:
  std::vector<std::vector<std::string>> rows_;
  std::string alignment_;
  std::vector<size_t> shortened_ = {0};
};

// A key as it is printed: the empty key as "".
std::string key_text(const std::string& key);

// The characters of the text, without its colours.
size_t width_of(std::string_view text);
// The text with "..." in its middle, of at most `width` columns (at least 5).
std::string shortened(const std::string& text, size_t width);
// The columns of the terminal that standard output is; 0 if it is none.
size_t terminal_width();

// Shows progress, rate and remaining time in one line on standard error. Null if standard error is
// not a terminal.
ProgressFn progress_line();

// Writes the parts to a file, one after another. Error(kIo) with path and errno; a regular file
// that could not be written whole is removed.
void write_file(const std::string& path, std::initializer_list<std::string_view> parts);

// Whether one of the shell-style patterns (*, ?, [...]) matches the key. True without patterns.
bool matches(const std::vector<std::string>& patterns, const std::string& key);

}  // namespace tilestone::cli
