// What the subcommands print with.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tilestone/tilestone.h"

namespace tilestone::cli {

// "1.5 GiB", "640 B".
std::string human_bytes(uint64_t bytes);
// "12,345"
std::string grouped(uint64_t number);
// "1 tensor", "2,000 tensors".
std::string counted(uint64_t number, std::string_view noun);
// Control characters as \xNN, so that a key can't steer the terminal; all else unchanged.
std::string printable(std::string_view text);
// "float32", "[4, 8]".
std::string shape_text(const Dims& shape);

// Of chunks and objects: how many copies there are, and the bytes of their elements and items.
uint64_t copies_in(const Metadata& metadata);
uint64_t copy_bytes(const Metadata& metadata);

// Columns padded to their widest cell; the alignment string has 'l' or 'r' for each column.
class Table {
 public:
  Table(std::vector<std::string> header, std::string alignment);
  void add(std::vector<std::string> row);
  void print() const;  // to standard output

 private:
  std::vector<std::vector<std::string>> rows_;
  std::string alignment_;
};

// A line on standard error that shows how far long work is, with rate and time left: only when
// standard error is a terminal, otherwise empty.
ProgressFn progress_line();

// Shell-style patterns (*, ?, [...]); true when there are none or one matches the key.
bool matches(const std::vector<std::string>& patterns, const std::string& key);

}  // namespace tilestone::cli
