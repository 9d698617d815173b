#include "tilestone/base/printable.h"

#include <algorithm>
#include <iterator>

namespace tilestone {
namespace {

struct Range {
  uint32_t first;
  uint32_t last;
};
// Unicode categories Cc, Cf, Cs, Co, Zl, Zp, Zs (except the space) and noncharacters.
constexpr Range kNotPrintable[] = {
    {0x0, 0x1f},        {0x7f, 0xa0},       {0xad, 0xad},       {0x600, 0x605},
    {0x61c, 0x61c},     {0x6dd, 0x6dd},     {0x70f, 0x70f},     {0x890, 0x891},
    {0x8e2, 0x8e2},     {0x1680, 0x1680},   {0x180e, 0x180e},   {0x2000, 0x200f},
    {0x2028, 0x202f},   {0x205f, 0x206f},   {0x3000, 0x3000},   {0xd800, 0xf8ff},
    {0xfdd0, 0xfdef},   {0xfeff, 0xfeff},   {0xfff0, 0xfffb},   {0xfffe, 0xffff},
    {0x110bd, 0x110bd}, {0x110cd, 0x110cd}, {0x13430, 0x1343f}, {0x1bca0, 0x1bca3},
    {0x1d173, 0x1d17a}, {0x1fffe, 0x1ffff}, {0xe0000, 0xe00ff}, {0xe01f0, 0x10ffff},
};

void append_hex(std::string& out, char letter, uint32_t code, int digits) {
  out += '\\';
  out += letter;
  for (int i = digits - 1; i >= 0; --i) out += "0123456789abcdef"[code >> (4 * i) & 0xf];
}

}  // namespace

CodePoint first_code_point(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint32_t>(static_cast<uint8_t>(text[i])); };
  const uint32_t lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  const size_t size = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < size) return {};
  uint32_t code = lead & (0x7fu >> size);
  for (size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {};
    code = code << 6 | (byte(i) & 0x3f);
  }
  constexpr uint32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
  if (code < kSmallest[size] || code > 0x10ffff) return {};
  return {code, size};
}

bool is_printable(uint32_t code) {
  const auto* range = std::lower_bound(std::begin(kNotPrintable), std::end(kNotPrintable), code,
                                       [](const Range& r, uint32_t c) { return r.last < c; });
  return range == std::end(kNotPrintable) || code < range->first;
}

void append_escaped(std::string& out, uint32_t code) {
  if (code <= 0xff) return append_hex(out, 'x', code, 2);
  if (code <= 0xffff) return append_hex(out, 'u', code, 4);
  append_hex(out, 'U', code, 8);
}

std::string printable(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const CodePoint point = first_code_point(text);
    const size_t size = point.size == 0 ? 1 : point.size;
    if (text[0] == '\n') {
      out += "\\n";
    } else if (point.size == 0) {
      append_escaped(out, static_cast<uint8_t>(text[0]));
    } else if (is_printable(point.code)) {
      out += text.substr(0, size);
    } else {
      append_escaped(out, point.code);
    }
    text.remove_prefix(size);
  }
  return out;
}

}  // namespace tilestone
