// Values as text: Python's repr, without more work than the limit requires.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "tilestone/base/printable.h"
#include "tilestone/state/value.h"

namespace tilestone {
namespace {

// ---- Numbers ----

// Python's repr of a float: the shortest digits that read back as the same float. Plain notation
// for decimal exponents from -4 to 15, otherwise an exponent of at least two digits.
std::string float_repr(double value) {
  if (std::isnan(value)) return "nan";
  const std::string text = fmt::format("{}", value);
  const bool is_whole = text.find_first_not_of("-0123456789") == std::string::npos;
  return is_whole ? text + ".0" : text;
}

// The magnitude of a two's complement number as base 2^32 digits, lowest first.
std::vector<uint32_t> magnitude(const Bytes& bytes, bool negative) {
  std::vector<uint32_t> digits(bytes.size() / 4 + 1, negative ? ~uint32_t{0} : 0);
  for (size_t i = 0; i < bytes.size(); ++i) {
    const size_t shift = 8 * (i % 4);
    uint32_t& digit = digits[i / 4];
    digit = (digit & ~(uint32_t{0xff} << shift)) | (std::to_integer<uint32_t>(bytes[i]) << shift);
  }
  if (!negative) return digits;
  uint64_t carry = 1;  // -x = ~x + 1
  for (uint32_t& digit : digits) {
    carry += static_cast<uint32_t>(~digit);
    digit = static_cast<uint32_t>(carry);
    carry >>= 32;
  }
  return digits;
}

}  // namespace

std::string to_string(const BigInt& value) {
  const bool negative =
      !value.bytes.empty() && (value.bytes.back() & std::byte{0x80}) != std::byte{0};
  std::vector<uint32_t> digits = magnitude(value.bytes, negative);
  std::string text;  // lowest digit first
  while (!digits.empty()) {
    uint64_t rest = 0;
    for (size_t i = digits.size(); i-- > 0;) {
      rest = rest << 32 | digits[i];
      digits[i] = static_cast<uint32_t>(rest / 1'000'000'000);
      rest %= 1'000'000'000;
    }
    while (!digits.empty() && digits.back() == 0) digits.pop_back();
    for (int i = 0; i < 9; ++i, rest /= 10) text += static_cast<char>('0' + rest % 10);
  }
  while (text.size() > 1 && text.back() == '0') text.pop_back();
  if (negative) text += '-';
  std::reverse(text.begin(), text.end());
  return text;
}

namespace {

// Python shows at most 4,300 decimal digits of an int, because their cost is quadratic.
constexpr size_t kMaxDecimalBytes = 1785;

std::string big_int_repr(const BigInt& value) {
  if (value.bytes.size() <= kMaxDecimalBytes) return to_string(value);
  return "int of " + std::to_string(value.bytes.size()) + " bytes";
}

// ---- Strings ----

// Appends the escapes that strings and bytes have in common. Returns false for any other character.
bool append_common_escape(std::string& out, uint32_t code, char quote) {
  if (code == static_cast<unsigned char>(quote) || code == '\\') {
    out += '\\';
    out += static_cast<char>(code);
  } else if (code == '\n') {
    out += "\\n";
  } else if (code == '\r') {
    out += "\\r";
  } else if (code == '\t') {
    out += "\\t";
  } else if (code < 0x20 || code == 0x7f) {
    append_escaped(out, code);
  } else {
    return false;
  }
  return true;
}

char quote_for(bool has_single, bool has_double) { return has_single && !has_double ? '"' : '\''; }

void append_string_repr(std::string& out, std::string_view text, size_t limit) {
  const char quote = quote_for(text.find('\'') != text.npos, text.find('"') != text.npos);
  out += quote;
  while (!text.empty() && out.size() <= limit) {
    const CodePoint point = first_code_point(text);
    if (point.size == 0) {  // not UTF-8
      append_escaped(out, static_cast<uint8_t>(text[0]));
      text.remove_prefix(1);
      continue;
    }
    if (!append_common_escape(out, point.code, quote)) {
      if (is_printable(point.code)) {
        out += text.substr(0, point.size);
      } else {
        append_escaped(out, point.code);
      }
    }
    text.remove_prefix(point.size);
  }
  out += quote;
}

void append_bytes_repr(std::string& out, ByteView bytes, size_t limit) {
  const std::string_view text = as_text(bytes);
  const char quote = quote_for(text.find('\'') != text.npos, text.find('"') != text.npos);
  out += 'b';
  out += quote;
  for (const char c : text) {
    if (out.size() > limit) break;
    const auto code = static_cast<uint32_t>(static_cast<uint8_t>(c));
    if (append_common_escape(out, code, quote)) continue;
    if (code < 0x80) {
      out += c;
    } else {
      append_escaped(out, code);
    }
  }
  out += quote;
}

// ---- Containers ----

// Writes values as text. Stops as soon as the limit is exceeded.
class Printer {
 public:
  explicit Printer(size_t limit) : limit_(limit) {}

  std::string text(const Value& value) {
    print(value);
    if (out_.size() <= limit_) return std::move(out_);
    size_t end = limit_;
    while (end > 0 && (static_cast<uint8_t>(out_[end]) & 0xc0) == 0x80) --end;
    return out_.substr(0, end) + "...";
  }

 private:
  void say(std::string_view text) { out_ += text; }

  void print(const Value& value) {
    using Kind = Value::Kind;
    switch (value.kind()) {
      case Kind::kNull:
        return say("None");
      case Kind::kBool:
        return say(value.as_bool() ? "True" : "False");
      case Kind::kInt:
        return say(std::to_string(value.as_int()));
      case Kind::kBigInt:
        return say(big_int_repr(value.as_big_int()));
      case Kind::kFloat:
        return say(float_repr(value.as_float()));
      case Kind::kString:
        return append_string_repr(out_, value.as_string(), limit_);
      case Kind::kBytes:
        return append_bytes_repr(out_, value.as_bytes(), limit_);
      case Kind::kTensor:
        return print_tensor(value.as_tensor(), value.autograd().parameter);
      case Kind::kDType:
        return say("torch." + std::string(to_string(value.as_dtype())));
      case Kind::kPickled:
        return say("pickled object of " + std::to_string(value.as_pickled().bytes.size()) +
                   " bytes");
      case Kind::kList:
        return print_parts("[", value.items(), {}, "", "]");
      case Kind::kTuple:
        return print_parts("(", value.items(), {}, "", value.items().size() == 1 ? ",)" : ")");
      case Kind::kDict:
        return value.is_ordered_dict()
                   ? print_parts("OrderedDict({", {}, value.as_dict(), ": ", "})")
                   : print_parts("{", {}, value.as_dict(), ": ", "}");
      case Kind::kOpaque:
        return print_opaque(value.as_opaque());
    }
  }

  void print_tensor(const TensorView& view, bool is_parameter) {
    out_ += is_parameter ? "parameter " : "tensor ";
    out_ += std::string(to_string(view.dtype)) + " " + to_string(view.shape);
  }

  // The elements of a container, then its entries. `separator`: between key and value of an entry.
  void print_parts(std::string_view open, const Value::List& items, const Value::Dict& entries,
                   std::string_view separator, std::string_view close) {
    out_ += open;
    bool is_first = true;
    const auto is_full = [&] {
      if (!std::exchange(is_first, false)) out_ += ", ";
      return out_.size() > limit_;
    };
    for (const Value& item : items) {
      if (is_full()) return;
      print(item);
    }
    for (const auto& [key, value] : entries) {
      if (is_full()) return;
      separator == "=" ? print_name(key) : print(key);
      out_ += separator;
      print(value);
    }
    out_ += close;
  }

  // Items that are added to the object are shown as ".update(...)".
  void print_opaque(const Opaque& opaque) {
    if (opaque.module != "builtins") out_ += opaque.module + ".";
    out_ += opaque.name;
    if (opaque.kind == Opaque::Kind::kGlobal) return;
    print_parts("(", opaque.args, named_parts(opaque), "=", ")");
    if (opaque.appended.empty() && opaque.entries.empty()) return;
    print_parts(".update(", opaque.appended, opaque.entries, ": ", ")");
  }

  // Attributes are shown as keyword arguments, as in argparse.Namespace's repr.
  static Value::Dict named_parts(const Opaque& opaque) {
    Value::Dict parts = opaque.keywords;
    if (opaque.has_state && opaque.state.kind() == Value::Kind::kDict) {
      parts.insert(parts.end(), opaque.state.as_dict().begin(), opaque.state.as_dict().end());
    } else if (opaque.has_state) {
      parts.emplace_back(Value("state"), opaque.state);
    }
    return parts;
  }

  // The name of an attribute, without quotes.
  void print_name(const Value& key) {
    const std::string_view text =
        key.kind() == Value::Kind::kString ? std::string_view(key.as_string()) : "";
    const bool is_name = !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
      return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
    });
    if (!is_name) return print(key);
    out_ += text;
  }

  const size_t limit_;
  std::string out_;
};

}  // namespace

std::string to_string(const Value& value, size_t limit) { return Printer(limit).text(value); }

}  // namespace tilestone
