#include "tilestone/format/archive/value_reader_internal.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/format/archive/pickle_schema_internal.h"
#include "tilestone/format/archive/tensor_node_internal.h"

namespace tilestone::archive {
namespace {

using Nodes = std::span<const NodeId>;

[[noreturn]] void unsafe(const std::string& problem) {
  throw Error(ErrorCode::kUnsafe, "pickle: " + problem);
}

// How a call is read. kNone: as a call.
enum class Meaning { kNone, kEncode, kEmptyBytes, kOrderedDict };

Meaning meaning_of(const Pickle& pickle, NodeId id, size_t arguments) {
  const NodeId function = pickle.callable(id);
  const auto is = [&](std::string_view module, std::string_view name) {
    return pickle.is_global(function, module, name);
  };
  if (is("collections", "OrderedDict") && arguments == 0) return Meaning::kOrderedDict;
  if (!pickle.is(id, NodeKind::kCall)) return Meaning::kNone;
  if (is("_codecs", "encode") && arguments == 2) return Meaning::kEncode;
  if (is("builtins", "bytes") && arguments == 0) return Meaning::kEmptyBytes;
  return Meaning::kNone;
}

// The int of little-endian two's complement bytes of any length >= 1.
Value integer_value(std::string_view bytes) {
  const auto sign = static_cast<uint8_t>(static_cast<uint8_t>(bytes.back()) >> 7 ? 0xff : 0);
  while (bytes.size() > 1 && static_cast<uint8_t>(bytes.back()) == sign &&
         (static_cast<uint8_t>(bytes[bytes.size() - 2]) & 0x80) == (sign & 0x80)) {
    bytes.remove_suffix(1);
  }
  if (bytes.size() > 8) return BigInt{to_bytes(bytes)};
  uint64_t value = sign != 0 ? ~uint64_t{0} : 0;
  std::memcpy(&value, bytes.data(), bytes.size());
  return static_cast<int64_t>(value);
}

// The bytes of a text whose characters are bytes; protocol 2 writes bytes in this way.
Bytes from_latin1(std::string_view text) {
  Bytes bytes(text.size());
  size_t count = 0;
  uint8_t most = 0;  // of the characters' first bytes
  for (size_t i = 0; i < text.size();) {
    const auto c = static_cast<uint8_t>(text[i]);
    const bool two = c >= 0x80;  // the text is UTF-8, so another byte follows
    const auto next = static_cast<uint8_t>(text[i + (two ? 1 : 0)]);
    bytes[count++] = static_cast<std::byte>(two ? c << 6 | (next & 0x3f) : c);
    most = std::max(most, c);
    i += two ? 2 : 1;
  }
  if (most > 0xc3) unsafe("latin1 text has characters that latin1 does not have");
  bytes.resize(count);
  return bytes;
}

class ValueReader {
 public:
  ValueReader(const Pickle& pickle, const MakeTensor& make)
      : pickle_(pickle), make_(make), done_(pickle.node_count()) {}

  // Depth first, children before parents, with an explicit stack instead of recursion.
  Value read(NodeId root) {
    if (is_small(root)) return pickle_.integer(root);
    work_.push_back({root, false});
    while (!work_.empty()) {
      const auto [id, children_done] = work_.back();
      work_.pop_back();
      if (children_done) {
        finish(id);
      } else if (!done_[id].finished) {
        open(id);
      }
    }
    return done_[root].value;
  }

 private:
  struct Done {
    Value value;
    uint64_t unfolded = 0;  // bytes; each shared part is counted as often as it occurs
    bool opened = false;
    bool finished = false;
  };
  struct Step {
    NodeId id;
    bool children_done;
  };

  static bool is_small(NodeId id) { return (id & 0x80000000) != 0; }

  template <typename Visit>
  void for_each_child(NodeId id, const Visit& visit) const {
    const auto all = [&](Nodes nodes) { std::for_each(nodes.begin(), nodes.end(), visit); };
    switch (pickle_.kind(id)) {
      case NodeKind::kTuple:
      case NodeKind::kList:
      case NodeKind::kDict:
      case NodeKind::kSet:
      case NodeKind::kFrozenSet:
        all(pickle_.items(id));
        break;
      case NodeKind::kPersistent:
        visit(pickle_.args(id));
        break;
      case NodeKind::kCall:
      case NodeKind::kNew: {
        all(pickle_.items(pickle_.args(id)));
        if (pickle_.state(id) != kNoNode) visit(pickle_.state(id));
        if (const ObjectItems* items = pickle_.object_items(id)) {
          if (items->keywords != kNoNode) all(pickle_.items(items->keywords));
          all(items->appended);
          all(items->entries);
        }
        break;
      }
      default:
        break;
    }
  }

  void open(NodeId id) {
    Done& node = done_[id];
    if (node.opened) unsafe("a container holds itself");
    node.opened = true;
    const auto tensor = read_tensor_node(pickle_, id);
    if (tensor && !tensor->has_attributes) {
      node.value = read_tensor(*tensor);
      node.unfolded = sizeof(Value);
      node.finished = true;
      return;
    }
    work_.push_back({id, true});
    for_each_child(id, [&](NodeId child) {
      if (is_small(child) || done_[child].finished) return;
      if (done_[child].opened) unsafe("a container holds itself");
      work_.push_back({child, false});
    });
  }

  void finish(NodeId id) {
    Done& node = done_[id];
    measure(id, node);
    try {
      node.value = build(id);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kInvalidArgument) throw;
      unsafe(error.message());  // it is nested too deep
    }
    node.finished = true;
  }

  // Checks the limits. A value's own bytes are copied once; shared parts are not copied.
  void measure(NodeId id, Done& node) {
    const uint64_t own = shallow_bytes(id);
    copied_ += own;
    node.unfolded = sizeof(Value) + own;
    for_each_child(id, [&](NodeId child) {
      copied_ += sizeof(Value) + (is_small(child) ? 0 : text_bytes(child));
      node.unfolded += is_small(child) ? sizeof(Value) : done_[child].unfolded;
      check_size(copied_, kMaxCopied + kCopiedFactor * pickle_.size());
      check_size(node.unfolded, kMaxUnfolded + kCopiedFactor * pickle_.size());
    });
  }
  static void check_size(uint64_t bytes, uint64_t limit) {
    if (bytes > limit) unsafe("it unfolds to more than " + std::to_string(limit) + " bytes");
  }

  // The bytes of a text that each value that holds it copies.
  uint64_t text_bytes(NodeId id) const {
    const NodeKind kind = pickle_.kind(id);
    const bool copied = kind == NodeKind::kString || kind == NodeKind::kLong;
    return copied ? pickle_.text(id).size() : 0;
  }
  uint64_t shallow_bytes(NodeId id) const {
    switch (pickle_.kind(id)) {
      case NodeKind::kString:
      case NodeKind::kBytes:
      case NodeKind::kByteArray:
      case NodeKind::kLong:
        return pickle_.text(id).size();
      case NodeKind::kGlobal:
      case NodeKind::kAttribute:
        return pickle_.qualified_name(id).size() + pickle_.module(id).size();
      case NodeKind::kCall:
      case NodeKind::kNew:
        return shallow_bytes(pickle_.callable(id));
      default:
        return 0;
    }
  }

  Value value_of(NodeId id) const {
    return is_small(id) ? Value(pickle_.integer(id)) : done_[id].value;
  }
  Value::List values_of(Nodes nodes) const {
    Value::List values;
    values.reserve(nodes.size());
    for (NodeId id : nodes) values.push_back(value_of(id));
    return values;
  }
  Value::Dict entries_of(Nodes nodes) const {
    Value::Dict entries;
    entries.reserve(nodes.size() / 2);
    for (size_t i = 0; i + 1 < nodes.size(); i += 2) {
      entries.emplace_back(value_of(nodes[i]), value_of(nodes[i + 1]));
    }
    return entries;
  }

  Value build(NodeId id) const {
    switch (pickle_.kind(id)) {
      case NodeKind::kNone:
        return nullptr;
      case NodeKind::kBool:
        return pickle_.boolean(id);
      case NodeKind::kInt:
        return pickle_.integer(id);
      case NodeKind::kLong:
        return integer_value(pickle_.text(id));
      case NodeKind::kFloat:
        return pickle_.floating(id);
      case NodeKind::kString:
        return std::string(pickle_.text(id));
      case NodeKind::kBytes:
        return to_bytes(pickle_.text(id));
      case NodeKind::kByteArray:
        return builtin_call("bytearray", {Value(to_bytes(pickle_.text(id)))});
      case NodeKind::kGlobal:
      case NodeKind::kAttribute:
        return build_global(id);
      case NodeKind::kTuple:
        return Value::tuple(values_of(pickle_.items(id)));
      case NodeKind::kList:
        return Value::list(values_of(pickle_.items(id)));
      case NodeKind::kDict:
        return Value::dict(entries_of(pickle_.items(id)));
      case NodeKind::kSet:
        return builtin_call("set", {Value::list(values_of(pickle_.items(id)))});
      case NodeKind::kFrozenSet:
        return builtin_call("frozenset", {Value::list(values_of(pickle_.items(id)))});
      case NodeKind::kPersistent:
        return build_persistent(id);
      case NodeKind::kCall:
      case NodeKind::kNew:
        return build_object(id);
    }
    throw Error(ErrorCode::kInternal, "pickle: a node has an unknown kind");
  }

  static Value builtin_call(std::string_view name, Value::List args) {
    Opaque opaque;
    opaque.kind = Opaque::Kind::kCall;
    opaque.module = "builtins";
    opaque.name = name;
    opaque.args = std::move(args);
    return opaque;
  }

  Value build_global(NodeId id) const {
    if (const auto dtype = read_dtype(pickle_, id)) return *dtype;
    Opaque opaque;
    opaque.module = canonical_module(pickle_.module(id));
    opaque.name = pickle_.qualified_name(id);
    return opaque;
  }

  // The module of pathlib's classes has another name in Python 3.13.
  static std::string canonical_module(std::string_view module) {
    return module == "pathlib._local" ? "pathlib" : std::string(module);
  }

  Value build_persistent(NodeId id) const {
    Opaque opaque;
    opaque.kind = Opaque::Kind::kCall;
    opaque.name = "persistent_load";
    opaque.args = {value_of(pickle_.args(id))};
    return opaque;
  }

  Value build_object(NodeId id) const {
    const Nodes args = pickle_.items(pickle_.args(id));
    const ObjectItems* items = pickle_.object_items(id);
    switch (meaning_of(pickle_, id, args.size())) {
      case Meaning::kEmptyBytes:
        return Bytes();
      case Meaning::kEncode:
        if (pickle_.is(args[0], NodeKind::kString) && pickle_.is(args[1], NodeKind::kString) &&
            (pickle_.text(args[1]) == "latin1" || pickle_.text(args[1]) == "latin-1")) {
          return from_latin1(pickle_.text(args[0]));
        }
        return build_opaque(id);
      case Meaning::kOrderedDict: {
        const bool attributes = pickle_.state(id) != kNoNode;
        if (items != nullptr && (!items->appended.empty() || items->keywords != kNoNode)) {
          return build_opaque(id);
        }
        if (attributes && !pickle_.is(pickle_.state(id), NodeKind::kDict)) return build_opaque(id);
        return Value::ordered_dict(items == nullptr ? Value::Dict() : entries_of(items->entries),
                                   attributes ? value_of(pickle_.state(id)) : Value());
      }
      default:
        return build_opaque(id);
    }
  }

  Value build_opaque(NodeId id) const {
    const NodeId global = pickle_.callable(id);
    Opaque opaque;
    opaque.kind = pickle_.is(id, NodeKind::kCall) ? Opaque::Kind::kCall : Opaque::Kind::kNew;
    opaque.module = canonical_module(pickle_.module(global));
    opaque.name = pickle_.qualified_name(global);
    opaque.args = values_of(pickle_.items(pickle_.args(id)));
    if (pickle_.state(id) != kNoNode) {
      opaque.has_state = true;
      opaque.state = value_of(pickle_.state(id));
    }
    if (const ObjectItems* items = pickle_.object_items(id)) {
      if (items->keywords != kNoNode) {
        opaque.keywords = entries_of(pickle_.items(items->keywords));
      }
      opaque.appended = values_of(items->appended);
      opaque.entries = entries_of(items->entries);
    }
    return opaque;
  }

  Value read_tensor(const TensorNode& tensor) {
    if (make_) return make_(tensor);
    throw Error(ErrorCode::kUnsupported,
                "pickle: a bare pickle does not contain the elements of its tensors");
  }

  const Pickle& pickle_;
  const MakeTensor& make_;
  std::vector<Done> done_;
  std::vector<Step> work_;
  uint64_t copied_ = 0;  // bytes of all values made so far
};

}  // namespace

Value read_value(const Pickle& pickle, const MakeTensor& make) {
  return ValueReader(pickle, make).read(pickle.root());
}

}  // namespace tilestone::archive
