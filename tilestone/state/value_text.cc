// Values as text: Python's repr, without recursion and without more work than the limit requires.
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <deque>
#include <iterator>

#include "tilestone/base/printable.h"
#include "tilestone/state/value.h"

namespace tilestone {
namespace {

// ---- Numbers ----

// Python's repr of a float: the shortest digits that read back as the same float. Plain notation
// for decimal exponents from -4 to 15, otherwise an exponent of at least two digits.
std::string float_repr(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  std::array<char, 32> buffer;
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value,
                                 std::chars_format::scientific)
                       .ptr;
  const std::string text(buffer.data(), end);
  const size_t e = text.find('e');
  const int exponent = std::stoi(text.substr(e + 1));
  if (exponent < -4 || exponent > 15) return text;
  std::string digits;
  std::copy_if(text.begin(), text.begin() + static_cast<ptrdiff_t>(e), std::back_inserter(digits),
               [](char c) { return c >= '0' && c <= '9'; });
  const std::string sign = std::signbit(value) ? "-" : "";
  if (exponent < 0)
    return sign + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  const auto whole = static_cast<size_t>(exponent) + 1;
  if (digits.size() < whole) digits.append(whole - digits.size(), '0');
  if (digits.size() == whole) digits += '0';
  return sign + digits.insert(whole, ".");
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

// Writes values as text, with an explicit stack. Stops as soon as the limit is exceeded.
class Printer {
 public:
  explicit Printer(size_t limit) : limit_(limit) {}

  std::string print(const Value& value) {
    step(value);
    while (!todo_.empty() && out_.size() <= limit_) {
      if (!next()) todo_.pop_back();
    }
    return cut();
  }

 private:
  // A container that is being written: first elements, then dict entries, then the closing text.
  struct Frame {
    const Value::List* items = nullptr;
    const Value::Dict* entries = nullptr;
    const Opaque* opaque = nullptr;  // its update() call follows
    std::string_view separator;      // between key and value of an entry
    std::string_view close;
    std::string_view close_single;  // if there was only one element (a tuple's comma)
    size_t at = 0;
    bool in_entry = false;  // the key is written, but not its value
  };

  // Writes the next part of the innermost container. Returns false when the container is complete.
  bool next() {
    Frame& frame = todo_.back();
    const size_t items = frame.items != nullptr ? frame.items->size() : 0;
    const size_t entries = frame.entries != nullptr ? frame.entries->size() : 0;
    if (frame.in_entry) {
      frame.in_entry = false;
      out_ += frame.separator;
      step((*frame.entries)[frame.at++ - items].second);
      return true;
    }
    if (frame.at == items + entries) {
      out_ += frame.at == 1 ? frame.close_single : frame.close;
      const Opaque* opaque = frame.opaque;
      if (opaque == nullptr) return false;
      frame = rest_of(*opaque);
      return true;
    }
    if (frame.at > 0) out_ += ", ";
    if (frame.at < items) {
      step((*frame.items)[frame.at++]);
    } else {
      frame.in_entry = true;
      step((*frame.entries)[frame.at - items].first);
    }
    return true;
  }

  // Shows the items that are added to an opaque object as ".update(...)".
  Frame rest_of(const Opaque& opaque) {
    Frame frame;
    if (opaque.appended.empty() && opaque.entries.empty()) return frame;
    out_ += ".update(";
    frame.items = &opaque.appended;
    frame.entries = &opaque.entries;
    frame.separator = ": ";
    frame.close = frame.close_single = ")";
    return frame;
  }

  void open_opaque(const Opaque& opaque) {
    if (opaque.module != "builtins") out_ += opaque.module + ".";
    out_ += opaque.name;
    if (opaque.kind == Opaque::Kind::kGlobal) return;
    out_ += '(';
    Frame frame;
    frame.items = &opaque.args;
    frame.opaque = &opaque;
    frame.close = frame.close_single = ")";
    frame.entries = named_parts(opaque);
    frame.separator = "=";
    todo_.push_back(frame);
  }

  // Attributes are shown as keyword arguments, as in argparse.Namespace's repr.
  const Value::Dict* named_parts(const Opaque& opaque) {
    const bool dict = opaque.has_state && opaque.state.kind() == Value::Kind::kDict;
    if (opaque.keywords.empty() && dict) return &opaque.state.as_dict();
    if (opaque.keywords.empty() && !opaque.has_state) return nullptr;
    Value::Dict& parts = made_.emplace_back(opaque.keywords);
    if (dict) {
      parts.insert(parts.end(), opaque.state.as_dict().begin(), opaque.state.as_dict().end());
    } else if (opaque.has_state) {
      parts.emplace_back(Value("state"), opaque.state);
    }
    return &parts;
  }

  void step(const Value& value) {
    using Kind = Value::Kind;
    switch (value.kind()) {
      case Kind::kNull:
        out_ += "None";
        return;
      case Kind::kBool:
        out_ += value.as_bool() ? "True" : "False";
        return;
      case Kind::kInt:
        out_ += std::to_string(value.as_int());
        return;
      case Kind::kBigInt:
        out_ += big_int_repr(value.as_big_int());
        return;
      case Kind::kFloat:
        out_ += float_repr(value.as_float());
        return;
      case Kind::kString:
        return string_or_name(value.as_string());
      case Kind::kBytes:
        return append_bytes_repr(out_, value.as_bytes(), limit_);
      case Kind::kTensor:
        return tensor(value.as_tensor(), value.autograd().parameter);
      case Kind::kDType:
        out_ += "torch." + std::string(to_string(value.as_dtype()));
        return;
      case Kind::kPickled:
        out_ += "pickled object of " + std::to_string(value.as_pickled().bytes.size()) + " bytes";
        return;
      case Kind::kList:
      case Kind::kTuple:
      case Kind::kDict:
        return open_container(value);
      case Kind::kOpaque:
        return open_opaque(value.as_opaque());
    }
  }

  void tensor(const TensorView& view, bool is_parameter) {
    out_ += is_parameter ? "parameter " : "tensor ";
    out_ += std::string(to_string(view.dtype)) + " " + to_string(view.shape);
  }

  // The name of an attribute is shown without quotes.
  void string_or_name(std::string_view text) {
    const bool is_name = !todo_.empty() && todo_.back().in_entry && todo_.back().separator == "=" &&
                         !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
                           return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                                  (c >= '0' && c <= '9') || c == '_';
                         });
    if (is_name) {
      out_ += text;
    } else {
      append_string_repr(out_, text, limit_);
    }
  }

  void open_container(const Value& value) {
    Frame frame;
    if (value.kind() == Value::Kind::kDict) {
      frame.entries = &value.as_dict();
      frame.separator = ": ";
      const bool ordered = value.is_ordered_dict();
      out_ += ordered ? "OrderedDict({" : "{";
      frame.close = frame.close_single = ordered ? "})" : "}";
    } else {
      const bool tuple = value.kind() == Value::Kind::kTuple;
      frame.items = &value.items();
      out_ += tuple ? '(' : '[';
      frame.close = tuple ? ")" : "]";
      frame.close_single = tuple ? ",)" : "]";
    }
    todo_.push_back(frame);
  }

  std::string cut() {
    if (out_.size() <= limit_) return std::move(out_);
    size_t end = limit_;
    while (end > 0 && (static_cast<uint8_t>(out_[end]) & 0xc0) == 0x80) --end;
    return out_.substr(0, end) + "...";
  }

  size_t limit_;
  std::string out_;
  std::vector<Frame> todo_;
  std::deque<Value::Dict> made_;  // entries built here; a deque keeps their addresses stable
};

}  // namespace

std::string to_string(const Value& value, size_t limit) { return Printer(limit).print(value); }

}  // namespace tilestone
