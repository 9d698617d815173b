// A restricted pickle machine. It turns the opcodes of a pickle into an arena of nodes and does
// nothing else: no class is looked up, imported or called. Globals, calls and objects become nodes
// that describe them. The code that reads the nodes decides what they mean.
//
// Memory: every node, child and stack entry needs at least one byte of input. The machine uses at
// most kMemoryFactor bytes of memory for each byte of input. Nodes refer to each other by number,
// so deep nesting needs no recursion.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/format/archive/large_vector_internal.h"

namespace tilestone::archive {

// A node's number. An int from 0 to 2^31 - 1 needs no node: its id has the top bit set and the
// value in the other bits. Most shapes and offsets therefore take no memory.
using NodeId = uint32_t;
inline constexpr NodeId kNoNode = 0x7fffffff;

enum class NodeKind : uint8_t {
  kNone,
  kBool,
  kInt,
  kLong,  // an int in more than 8 bytes: little-endian two's complement
  kFloat,
  kString,  // UTF-8, lone surrogates allowed
  kBytes,
  kByteArray,
  kGlobal,     // a class or function by name
  kAttribute,  // an attribute of another global: getattr(Outer, "Inner")
  kTuple,
  kList,
  kDict,  // items(): key, value, key, value, ...
  kSet,
  kFrozenSet,
  kCall,       // callable(*args)
  kNew,        // callable.__new__(callable, *args, **keywords)
  kPersistent  // a persistent id, in args()
};

// What only few objects have: keyword arguments, and list items and dict entries that were added
// after the object was made.
struct ObjectItems {
  NodeId keywords = kNoNode;  // a dict; only in a kNew
  std::vector<NodeId> appended;
  std::vector<NodeId> entries;  // key, value, ...
};

class Pickle {
 public:
  static constexpr uint64_t kMemoryFactor = 64;
  // How torch.Size((...)) is read: as the tuple (which needs no nodes for the call) or as the call.
  enum class Sizes { kTuples, kCalls };

  // Parses a pickle of protocol 2 to 5. Borrows the bytes. Errors name the offset. Error(kCorrupt)
  // if the bytes are not a pickle; kUnsafe for what no pickler writes (items set on something that
  // is not a container, a call of something that is not a name) and for extension codes;
  // kUnsupported for other protocols and for buffers outside the pickle.
  //
  // Different encodings of the same thing are normalised: Python 2's names (protocol 2)
  // become Python 3's, getattr(Outer, "Inner") becomes a kAttribute, and copyreg's ways to call
  // __new__ become a kNew.
  static Pickle parse(ByteView bytes, Sizes sizes = Sizes::kTuples);

  NodeId root() const { return root_; }
  uint64_t size() const { return bytes_.size(); }
  size_t node_count() const { return nodes_.size(); }

  NodeKind kind(NodeId id) const { return is_small(id) ? NodeKind::kInt : nodes_[id].kind; }
  // Whether the id is an int from 0 to 2^31 - 1.
  static bool is_small(NodeId id) { return (id & kSmallFlag) != 0; }
  bool is(NodeId id, NodeKind kind) const { return this->kind(id) == kind; }
  bool boolean(NodeId id) const { return nodes_[id].a != 0; }
  int64_t integer(NodeId id) const {
    return is_small(id) ? static_cast<int64_t>(id & kSmallMask)
                        : static_cast<int64_t>(nodes_[id].wide());
  }
  double floating(NodeId id) const;
  // The bytes of a kString, kBytes, kByteArray or kLong.
  std::string_view text(NodeId id) const {
    return as_text(bytes_.subspan(nodes_[id].b, nodes_[id].a));
  }
  // The elements of a kTuple, kList, kDict, kSet or kFrozenSet.
  std::span<const NodeId> items(NodeId id) const {
    return {children_.data() + nodes_[id].b, nodes_[id].a};
  }
  // The module of a kGlobal or kAttribute. The name of a kGlobal; for a kAttribute only its last
  // part.
  std::string_view module(NodeId id) const;
  std::string_view name(NodeId id) const;
  // The full name of a kGlobal or kAttribute, with dots ("Outer.Inner").
  std::string qualified_name(NodeId id) const;
  // Whether the node is a kGlobal or kAttribute.
  bool is_named(NodeId id) const {
    return is(id, NodeKind::kGlobal) || is(id, NodeKind::kAttribute);
  }
  bool is_global(NodeId id, std::string_view module_name, std::string_view global_name) const {
    return is(id, NodeKind::kGlobal) && name(id) == global_name && module(id) == module_name;
  }
  // The parts of a kCall or kNew. A kPersistent has only args, which may be any node.
  NodeId callable(NodeId id) const { return nodes_[id].a; }
  NodeId args(NodeId id) const { return nodes_[id].b; }
  NodeId state(NodeId id) const { return nodes_[id].c; }  // kNoNode: none was set
  const ObjectItems* object_items(NodeId id) const;       // null: none

 private:
  friend class PickleMachine;
  static constexpr NodeId kSmallFlag = 0x80000000;
  static constexpr NodeId kSmallMask = 0x7fffffff;

  // A node has 16 bytes:
  //             a          b            c
  //  text       length     offset
  //  container  count      first child  capacity in children
  //  global     module     name         Special, and the row of Python 2's names << 8
  //  attribute  owner      name         nesting depth of attributes
  //  object     callable   args         state
  //  number                (c, b) are its 8 bytes
  struct Node {
    NodeKind kind = NodeKind::kNone;
    bool has_items = false;
    uint32_t a = 0;
    uint32_t b = 0;
    uint32_t c = 0;
    uint64_t wide() const { return static_cast<uint64_t>(c) << 32 | b; }
  };
  // Globals that the machine itself interprets.
  enum Special : uint32_t {
    kOrdinary,
    kSize,
    kGetattr,
    kNewobj,
    kNewobjEx,
    kReconstructor,
    kPartial
  };
  static Special special_of(std::string_view module, std::string_view name);
  Special special(NodeId id) const {
    return is(id, NodeKind::kGlobal) ? static_cast<Special>(nodes_[id].c & 0xff) : kOrdinary;
  }

  ByteView bytes_;
  LargeVector<Node> nodes_;
  LargeVector<NodeId> children_;
  std::unordered_map<NodeId, ObjectItems> object_items_;  // few objects have any
  NodeId root_ = kNoNode;
};

}  // namespace tilestone::archive
