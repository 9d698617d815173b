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

// A shared value is checked once.
class ValueChecker {
 public:
  void check(const Value& value) {
    const uint64_t unfolded = unfolded_bytes(value);
    // Never without shared parts: a value takes at least one byte of the pickle.
    static_assert(sizeof(Value) <= kCopiedFactor);
    const uint64_t limit = kMaxUnfolded + kCopiedFactor * least_written_;
    if (unfolded <= limit) return;
    refuse("the object contains the same parts so often that it would unfold to more than " +
           std::to_string(limit) + " bytes");
  }

 private:
  // Each shared part is counted as often as it occurs.
  uint64_t unfolded_bytes(const Value& value) {
    const void* const shared = value.shared_id();
    const auto known = known_.find(shared);
    if (known != known_.end()) return known->second;
    check_alone(value);
    const uint64_t own = shallow_bytes(value);
    least_written_ += 1 + own;
    uint64_t unfolded = sizeof(Value) + own;
    for_each_child(value, [&](const Value& child) {
      unfolded = add_up_to_max(unfolded, unfolded_bytes(child));
    });
    if (shared != nullptr) known_.emplace(shared, unfolded);
    return unfolded;
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

  std::unordered_map<const void*, uint64_t> known_;  // by Value::shared_id()
  uint64_t least_written_ = 0;                       // bytes of the pickle at least
};

// Calls visit(opaque) for each opaque object of a value.
template <typename Visit>
void for_each_opaque(const Value& value, const Visit& visit) {
  std::unordered_set<const void*> seen;
  for_each_part(value, [&](const Value& part) {
    const void* const shared = part.shared_id();
    if (shared != nullptr && !seen.insert(shared).second) return false;
    if (part.kind() == Value::Kind::kOpaque) visit(part.as_opaque());
    return true;
  });
}

constexpr std::string_view kUnreadable = "tilestone.unreadable";  // module of such values

bool is_unreadable(const Value& value) {
  return value.kind() == Value::Kind::kOpaque && value.as_opaque().module == kUnreadable;
}

// What is shared stays so, and is changed once.
class Readable {
 public:
  explicit Readable(const ChangeValue& change) : change_(change) {}

  Value of(const Value& given) {
    const void* const shared = given.shared_id();
    const auto known = known_.find(shared);
    if (known != known_.end()) return known->second;
    Value made = made_of(given);
    if (shared != nullptr) known_.emplace(shared, made);
    return made;
  }

 private:
  Value made_of(const Value& given) {
    if (is_unreadable(given)) {
      return unreadable("an object of the module " + std::string(kUnreadable));
    }
    const Value value = change_ ? change_(given) : given;
    if (value.kind() == Value::Kind::kDict) {
      Value::Dict entries = value.as_dict();
      for (auto& [key, item] : entries) item = of(item);
      return Value::dict(std::move(entries));
    }
    if (value.kind() == Value::Kind::kList) {
      Value::List items = value.items();
      for (Value& item : items) item = of(item);
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

  const ChangeValue& change_;
  std::unordered_map<const void*, Value> known_;  // by the id of what is given
};

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

Value readable(const Value& tree, const ChangeValue& change) { return Readable(change).of(tree); }

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
