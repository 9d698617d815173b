// Text that people see. Names from a file could otherwise forge lines in a log, control the
// terminal, or change the order in which the text around them is shown.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tilestone {

// One UTF-8 character at the start of a text that is not empty. Surrogates are accepted, as with
// Python's "surrogatepass". `size` is in bytes; 0 if there is no valid character.
struct CodePoint {
  uint32_t code = 0;
  size_t size = 0;
};
CodePoint first_code_point(std::string_view text);

// As Python's str.isprintable(): false for control and format characters, separators other than
// the space, surrogates, private use and noncharacters. Unassigned code points, which differ
// between Python versions, count as printable.
bool is_printable(uint32_t code);

// Appends the code point as Python's repr() would: \x1b, \u202e, \U000e0001.
void append_escaped(std::string& out, uint32_t code);
// The text with everything that is not printable escaped, and bytes that are not UTF-8 as \xNN.
// Line breaks become \n, backslashes stay.
std::string printable(std::string_view text);

}  // namespace tilestone
