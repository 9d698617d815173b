// Rare opcodes, and those of protocols 0 and 1, which hardly any program writes today but stock
// readers still accept.
#include <charconv>
#include <optional>

#include "tilestone/format/archive/pickle_machine_internal.h"

namespace tilestone::archive {
namespace {

constexpr size_t kMaxIntDigits = 4300;  // as in Python, because the conversion is quadratic

void append_utf8(std::string& out, uint32_t code) {
  const auto put = [&](uint32_t byte) { out += static_cast<char>(byte); };
  if (code < 0x80) return put(code);
  if (code < 0x800) {
    put(0xc0 | code >> 6);
  } else {
    if (code < 0x10000) {
      put(0xe0 | code >> 12);
    } else {
      put(0xf0 | code >> 18);
      put(0x80 | (code >> 12 & 0x3f));
    }
    put(0x80 | (code >> 6 & 0x3f));
  }
  put(0x80 | (code & 0x3f));
}

// Parses `digits` hexadecimal digits at the start of `text`; nullopt if there are fewer.
std::optional<uint32_t> hex(std::string_view text, size_t digits) {
  uint32_t value = 0;
  if (text.size() < digits) return std::nullopt;
  const auto [end, error] = std::from_chars(text.data(), text.data() + digits, value, 16);
  if (error != std::errc() || end != text.data() + digits) return std::nullopt;
  return value;
}

// Converts the decimal digits of a magnitude to little-endian two's complement.
std::string two_complement(std::string_view digits, bool negative) {
  std::string bytes;
  for (const char digit : digits) {
    auto carry = static_cast<uint32_t>(digit - '0');
    for (char& byte : bytes) {
      carry += static_cast<uint32_t>(static_cast<uint8_t>(byte)) * 10;
      byte = static_cast<char>(carry);
      carry >>= 8;
    }
    if (carry != 0) bytes += static_cast<char>(carry);
  }
  bytes += '\0';
  if (!negative) return bytes;
  uint32_t carry = 1;
  for (char& byte : bytes) {
    carry += static_cast<uint8_t>(~static_cast<uint8_t>(byte));
    byte = static_cast<char>(carry);
    carry >>= 8;
  }
  return bytes;
}

}  // namespace

void PickleMachine::rare(uint8_t opcode) {
  switch (opcode) {
    case op::kProto: {
      protocol_ = u8();
      if (protocol_ > 5) {
        fail(ErrorCode::kUnsupported,
             "protocol " + std::to_string(protocol_) + " is not supported");
      }
      break;
    }
    case op::kFrame:
      if (little<uint64_t>() > static_cast<uint64_t>(end_ - at_)) {
        corrupt("a frame reaches beyond the end of the pickle");
      }
      break;
    case op::kBinFloat: {
      const auto bits = __builtin_bswap64(little<uint64_t>());
      push_node(wide_node(NodeKind::kFloat, bits));
      break;
    }
    case op::kLong4: {
      const auto size = little<int32_t>();
      if (size < 0) corrupt("a length is negative");
      push_long(static_cast<uint64_t>(size));
      break;
    }
    case op::kBinUnicode8:
      push_text(NodeKind::kString, little<uint64_t>());
      break;
    case op::kShortBinBytes:
      push_text(NodeKind::kBytes, u8());
      break;
    case op::kBinBytes:
      push_text(NodeKind::kBytes, little<uint32_t>());
      break;
    case op::kBinBytes8:
      push_text(NodeKind::kBytes, little<uint64_t>());
      break;
    case op::kByteArray8:
      push_text(NodeKind::kByteArray, little<uint64_t>());
      break;
    case op::kEmptySet:
      push_node({NodeKind::kSet, false, 0, 0, 0});
      break;
    case op::kAddItems:
      add_items(pop_mark());
      break;
    case op::kFrozenSet:
      push_tuple(pop_mark());
      node(stack_.back()).kind = NodeKind::kFrozenSet;
      break;
    case op::kBinPersId:
      push_node({NodeKind::kPersistent, false, kNoNode, pop(), kNoNode});
      break;
    case op::kNewObjEx:
      push_object_with_keywords();
      break;
    case op::kPop:
      if (stack_.size() > floor_) {
        stack_.pop_back();
      } else {
        pop_mark();  // as in Python, POP removes a mark that is on top
      }
      break;
    case op::kDup:
      push(top());
      break;
    case op::kPopMark:
      stack_.resize(pop_mark());
      break;
    default:
      old_opcode(opcode);
      break;
  }
}

// ---- Protocols 0 and 1 ----

void PickleMachine::push_decoded(NodeKind kind, std::string_view text) {
  std::string& made = pickle_.made_;
  if (made.size() + text.size() > std::numeric_limits<uint32_t>::max()) {
    corrupt("there is too much text");
  }
  Node decoded{kind, true, static_cast<uint32_t>(text.size()), static_cast<uint32_t>(made.size()),
               0};
  made += text;
  push_node(decoded);
}

// Pushes a str of Python 2: as a string if it is UTF-8, else as bytes.
void PickleMachine::push_python2_text(std::string_view text) {
  push_decoded(is_utf8(text) ? NodeKind::kString : NodeKind::kBytes, text);
}

void PickleMachine::push_decimal(std::string_view digits) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error == std::errc() && end == digits.data() + digits.size()) return push_int(value);
  const bool negative = digits.starts_with('-');
  if (negative) digits.remove_prefix(1);
  const bool number = !digits.empty() && std::all_of(digits.begin(), digits.end(),
                                                     [](char c) { return c >= '0' && c <= '9'; });
  if (!number || digits.size() > kMaxIntDigits) {
    corrupt("an int is not a decimal number, or has too many digits");
  }
  push_decoded(NodeKind::kLong, two_complement(digits, negative));
}

// Pushes a string in quotes with backslash escapes, as written by Python 2's repr.
void PickleMachine::push_quoted() {
  std::string_view text = line();
  if (text.size() < 2 || text.front() != text.back() ||
      (text.front() != '\'' && text.front() != '"')) {
    corrupt("a string has no quotes");
  }
  text = text.substr(1, text.size() - 2);
  std::string out;
  while (!text.empty()) {
    const char c = text.front();
    text.remove_prefix(1);
    if (c != '\\' || text.empty()) {
      out += c;
      continue;
    }
    const char escape = text.front();
    text.remove_prefix(1);
    constexpr std::string_view kNames = "\\'\"abfnrtv";
    constexpr std::string_view kMeanings = "\\'\"\a\b\f\n\r\t\v";
    if (const auto code = escape == 'x' ? hex(text, 2) : std::nullopt) {
      out += static_cast<char>(*code);
      text.remove_prefix(2);
    } else if (const size_t at = kNames.find(escape); at != kNames.npos) {
      out += kMeanings[at];
    } else {
      corrupt("a string has an unknown escape sequence");
    }
  }
  push_python2_text(out);
}

// Pushes Latin-1 text with the escapes \\uXXXX and \\UXXXXXXXX.
void PickleMachine::push_raw_unicode() {
  std::string_view text = line();
  std::string out;
  while (!text.empty()) {
    const size_t digits = text.starts_with("\\u") ? 4 : text.starts_with("\\U") ? 8 : 0;
    if (digits == 0) {
      append_utf8(out, static_cast<uint8_t>(text.front()));
      text.remove_prefix(1);
      continue;
    }
    const auto code = hex(text.substr(2), digits);
    if (!code || *code > 0x10ffff) corrupt("an escape sequence is not a Unicode character");
    append_utf8(out, *code);
    text.remove_prefix(2 + digits);
  }
  push_decoded(NodeKind::kString, out);
}

uint64_t PickleMachine::decimal_index() {
  const std::string_view digits = line();
  uint32_t index = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
  if (error != std::errc() || end != digits.data() + digits.size()) {
    corrupt("a memo index is not a number");
  }
  return index;
}

void PickleMachine::old_opcode(uint8_t opcode) {
  switch (opcode) {
    case op::kInt: {
      const std::string_view digits = line();
      if (digits == "00") return push(kFalseNode);
      if (digits == "01") return push(kTrueNode);
      return push_decimal(digits);
    }
    case op::kLong: {
      std::string_view digits = line();
      if (digits.ends_with('L')) digits.remove_suffix(1);
      return push_decimal(digits);
    }
    case op::kFloat: {
      std::string_view text = line();
      double value = 0;
      const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
      if (error != std::errc() || end != text.data() + text.size()) {
        corrupt("a float is not a number");
      }
      return push_node(wide_node(NodeKind::kFloat, std::bit_cast<uint64_t>(value)));
    }
    case op::kString:
      return push_quoted();
    case op::kUnicode:
      return push_raw_unicode();
    case op::kBinString:
    case op::kShortBinString: {
      const int64_t size = opcode == op::kBinString ? little<int32_t>() : u8();
      if (size < 0) corrupt("a length is negative");
      const uint8_t* from = take(static_cast<uint64_t>(size));
      return push_python2_text({reinterpret_cast<const char*>(from), static_cast<size_t>(size)});
    }
    case op::kDict:
    case op::kList: {
      const size_t first = pop_mark();
      const bool dict = opcode == op::kDict;
      if (dict && (stack_.size() - first) % 2 != 0) corrupt("a key has no value");
      push_tuple(first);
      node(stack_.back()).kind = dict ? NodeKind::kDict : NodeKind::kList;
      return;
    }
    case op::kGet:
      return get(decimal_index());
    case op::kPut:
      return put(decimal_index());
    case op::kInst: {
      push_global_line();
      const NodeId callable = pop();
      return push_instance(callable, pop_mark());
    }
    case op::kObj: {
      const size_t first = pop_mark();
      if (first == stack_.size()) corrupt("an object has no class");
      const NodeId callable = stack_[first];
      stack_.erase(stack_.begin() + static_cast<ptrdiff_t>(first));
      return push_instance(callable, first);
    }
    case op::kPersId: {
      push_python2_text(line());
      const NodeId id = pop();
      return push_node({NodeKind::kPersistent, false, kNoNode, id, kNoNode});
    }
    case op::kExt1:
    case op::kExt2:
    case op::kExt4:
      unsafe("a class is named by an extension code, whose meaning only the writer knows");
    case op::kNextBuffer:
    case op::kReadonlyBuffer:
      fail(ErrorCode::kUnsupported, "buffers outside the pickle are not supported");
    default:
      corrupt("byte " + std::to_string(opcode) + " is not an opcode");
  }
}

}  // namespace tilestone::archive
