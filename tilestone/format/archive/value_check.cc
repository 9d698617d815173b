#include "tilestone/format/archive/value_check_internal.h"

#include <algorithm>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/format/archive/archive_reader_internal.h"
#include "tilestone/format/archive/pickle_reader_internal.h"
#include "tilestone/format/archive/python2_names_internal.h"
#include "tilestone/format/archive/utf8_internal.h"
#include "tilestone/format/archive/value_reader_internal.h"
#include "tilestone/state/value_children.h"

namespace tilestone::archive {
namespace {

[[noreturn]] void refuse(const std::string& problem) {
  throw Error(ErrorCode::kInvalidArgument, problem);
}

// Checks depth first, by recursion that is limited to kMaxDepth. A shared value is checked once.
class ValueChecker {
 public:
  void check(const Value& value) {
    const uint64_t unfolded = check(value, 0).unfolded;
    // Never without shared parts: a value takes at least one byte of the pickle.
    static_assert(sizeof(Value) <= kCopiedFactor);
    const uint64_t limit = kMaxUnfolded + kCopiedFactor * least_written_;
    if (unfolded <= limit) return;
    refuse("the object contains the same parts so often that it would unfold to more than " +
           std::to_string(limit) + " bytes");
  }

 private:
  struct Extent {
    uint64_t unfolded = 0;  // bytes; each shared part is counted as often as it occurs
    uint32_t height = 0;    // levels of values below it
  };

  Extent check(const Value& value, uint32_t depth) {
    if (depth > kMaxDepth) too_deep();
    const void* shared = value.shared_id();
    if (shared == nullptr) return check_whole(value, depth);
    const auto known = known_.find(shared);
    if (known != known_.end()) {
      if (depth + known->second.height > kMaxDepth) too_deep();
      return known->second;
    }
    const Extent extent = check_whole(value, depth);
    known_.emplace(shared, extent);
    return extent;
  }

  [[noreturn]] static void too_deep() {
    refuse("the object is nested deeper than " + std::to_string(kMaxDepth) + " levels");
  }

  Extent check_whole(const Value& value, uint32_t depth) {
    check_alone(value);
    const uint64_t own = shallow_bytes(value);
    least_written_ += 1 + own;
    Extent extent{sizeof(Value) + own, 0};
    for_each_child(value, [&](const Value& child) {
      const Extent below = check(child, depth + 1);
      extent.unfolded = add_up_to_max(extent.unfolded, below.unfolded);
      extent.height = std::max(extent.height, below.height + 1);
    });
    return extent;
  }

  static uint64_t add_up_to_max(uint64_t a, uint64_t b) { return a + std::min(b, ~a); }
  static uint64_t shallow_bytes(const Value& value) {
    if (value.kind() == Value::Kind::kString) return value.as_string().size();
    return value.kind() == Value::Kind::kBytes ? value.as_bytes().size() : 0;
  }

  static void check_alone(const Value& value) {
    switch (value.kind()) {
      case Value::Kind::kString:
        return check_text(value.as_string());
      case Value::Kind::kDict:
        return check_keys(value.as_dict());
      case Value::Kind::kOpaque:
        return check_opaque(value.as_opaque());
      case Value::Kind::kPickled:
        refuse("an object that Python has pickled can't be part of another value");
      default:
        return;
    }
  }
  static void check_text(std::string_view text) {
    if (!is_utf8(text)) refuse("text that is not UTF-8 can't be saved");
  }
  static void check_keys(const Value::Dict& entries) {
    for (const auto& [key, item] : entries) check_key(key);
  }
  static void check_key(const Value& key) {
    const Value::Kind kind = key.kind();
    if (kind == Value::Kind::kList || kind == Value::Kind::kDict || kind == Value::Kind::kTensor) {
      refuse("a " + std::string(to_string(kind)) + " can't be a key of a dict");
    }
    if (kind != Value::Kind::kTuple) return;
    for (const Value& item : key.items()) check_key(item);
  }
  static void check_opaque(const Opaque& opaque) {
    check_text(opaque.module);
    check_text(opaque.name);
    if (opaque.module.empty() && opaque.name == "persistent_load") {
      refuse("a storage outside a tensor, such as that of a quantized tensor, is not supported");
    }
    const std::string full = opaque.module + "." + opaque.name;
    if (opaque.module.empty() || opaque.name.empty() || full.find('\n') != full.npos) {
      refuse("no class or function can be named \"" + full + "\"");
    }
    if (!opaque.keywords.empty() && opaque.kind != Opaque::Kind::kNew) {
      refuse("only an object of kind \"new\" can have keywords, not " + full);
    }
    for (const auto& [key, item] : opaque.keywords) {
      if (key.kind() != Value::Kind::kString) refuse("a keyword of " + full + " is not a string");
    }
    check_keys(opaque.entries);
  }

  std::unordered_map<const void*, Extent> known_;
  uint64_t least_written_ = 0;  // bytes of the pickle at least
};

// Calls visit(opaque) for each opaque object of a value.
template <typename Visit>
void for_each_opaque(const Value& value, const Visit& visit) {
  std::unordered_set<const void*> seen;
  std::vector<const Value*> todo{&value};
  while (!todo.empty()) {
    const Value& next = *todo.back();
    todo.pop_back();
    const void* shared = next.shared_id();
    if (shared != nullptr && !seen.insert(shared).second) continue;
    if (next.kind() == Value::Kind::kOpaque) visit(next.as_opaque());
    for_each_child(next, [&](const Value& child) { todo.push_back(&child); });
  }
}

constexpr std::string_view kUnreadable = "tilestone.unreadable";  // module of such values
constexpr uint64_t kMaxValues = uint64_t{1} << 22;

bool is_unreadable(const Value& value) {
  return value.kind() == Value::Kind::kOpaque && value.as_opaque().module == kUnreadable;
}

Value readable(const Value& given, const ChangeValue& change, uint64_t& values) {
  if (++values > kMaxValues) {
    throw Error(ErrorCode::kUnsupported, "there are too many values, and some can't be read");
  }
  if (is_unreadable(given))
    return unreadable("an object of the module " + std::string(kUnreadable));
  const Value value = change ? change(given) : given;
  if (value.kind() == Value::Kind::kDict) {
    Value::Dict entries = value.as_dict();
    for (auto& [key, item] : entries) item = readable(item, change, values);
    return Value::dict(std::move(entries));
  }
  if (value.kind() == Value::Kind::kList) {
    Value::List items = value.items();
    for (Value& item : items) item = readable(item, change, values);
    return Value::list(std::move(items));
  }
  if (is_unreadable(value)) return value;
  try {
    check_value(value);
    return value;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInvalidArgument) throw;
    return unreadable("an object: " + error.message());
  }
}

bool needs_protocol_4(const Opaque& opaque) {
  return opaque.name.find('.') != std::string::npos ||
         python2_row({opaque.module, opaque.name}) != 0;
}

}  // namespace

std::vector<std::string> classes_in_pickle(ByteView pickled, bool archive) {
  std::set<std::string> names;
  try {
    const Value value = archive ? view_archive(pickled)
                                : read_value(Pickle::parse(pickled, Pickle::Sizes::kCalls), {});
    for_each_opaque(value, [&](const Opaque& opaque) {
      // Only tensors keep the bytes of a storage. Without a tensor they would be lost.
      if (opaque.module.empty()) refuse("it contains a storage outside a tensor");
      names.insert(opaque.module + "." + opaque.name);
    });
  } catch (const Error& error) {
    throw Error(ErrorCode::kInvalidArgument,
                "the object could not be read back: " + error.message())
        .with_hint(error.advice());
  }
  return {names.begin(), names.end()};
}

void check_value(const Value& value) {
  if (value.kind() == Value::Kind::kPickled) {
    const Pickled& pickled = value.as_pickled();
    if (!pickled.checked) classes_in_pickle(pickled.bytes, pickled.archive);
  } else {
    ValueChecker().check(value);
  }
}

Value readable(const Value& tree, const ChangeValue& change) {
  uint64_t values = 0;
  return readable(tree, change, values);
}

Value unreadable(std::string reason) {
  Opaque opaque;
  opaque.module = kUnreadable;
  opaque.name = "value";
  opaque.args = {Value(std::move(reason))};
  return opaque;
}

std::string reason_in(const Value& value) {
  if (is_unreadable(value)) return value.as_opaque().args.at(0).as_string();
  std::string reason;
  if (value.kind() != Value::Kind::kDict && value.kind() != Value::Kind::kList) return reason;
  for_each_child(value, [&](const Value& child) {
    if (reason.empty()) reason = reason_in(child);
  });
  return reason;
}

int protocol_of(const Value& value) {
  int protocol = 2;
  for_each_opaque(value, [&](const Opaque& opaque) {
    if (needs_protocol_4(opaque)) protocol = 4;
  });
  return protocol;
}

}  // namespace tilestone::archive
