// A restricted pickle machine. It runs the opcodes of a pickle into an arena of nodes and nothing
// else: no class is looked up, imported or called; a global, a call and an object stay what the
// bytes say of them. Whoever reads the nodes decides what they mean.
//
// Memory: every node, child and stack entry is paid for by at least one byte of input, at most
// kMemoryFactor bytes for each. Depth costs nothing: nodes are numbers, not pointers to walk.
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

// A node's number. An int from 0 to 2^31 - 1 is its own node: the top bit is set and the value is
// in the others, so that shapes and offsets cost nothing.
using NodeId = uint32_t;
inline constexpr NodeId kNoNode = 0x7fffffff;

enum class NodeKind : uint8_t {
  kNone,
  kBool,
  kInt,
  kLong,  // an int beyond int64: little-endian two's complement bytes
  kFloat,
  kString,  // UTF-8, lone surrogates allowed
  kBytes,
  kByteArray,
  kGlobal,     // a class or function by name
  kAttribute,  // what stands inside another global: getattr(Outer, "Inner")
  kTuple,
  kList,
  kDict,  // items(): key, value, key, value, ...
  kSet,
  kFrozenSet,
  kCall,       // callable(*args)
  kNew,        // callable.__new__(callable, *args, **keywords)
  kPersistent  // a persistent id, in args()
};

// What few objects have: keyword arguments, and the list items and dict entries that an object was
// given after it was made.
struct ObjectItems {
  NodeId keywords = kNoNode;  // a dict; of a kNew
  std::vector<NodeId> appended;
  std::vector<NodeId> entries;  // key, value, ...
};

class Pickle {
 public:
  static constexpr uint64_t kMemoryFactor = 64;
  // How torch.Size((...)) is read: as the tuple, for which metadata needs no nodes, or as the call.
  enum class Sizes { kTuples, kCalls };

  // Borrows the bytes. All protocols, 0 to 5. Throws Error(kCorrupt) on bytes that are no pickle,
  // kUnsafe on what no pickler writes (items set on what is no container, a call of what is no
  // name) and on extension codes, kUnsupported on protocols from 6 on and buffers outside the
  // pickle; each names the offset.
  //
  // Several ways to say one thing become one: Python 2's names (protocols 0 to 2) are Python 3's,
  // getattr(Outer, "Inner") is a kAttribute, and copyreg's ways to call __new__ are a kNew.
  static Pickle parse(ByteView bytes, Sizes sizes = Sizes::kTuples);
  // The first of several pickles; `end`: where it ends.
  static Pickle parse_first(ByteView bytes, uint64_t& end);

  NodeId root() const { return root_; }
  uint64_t size() const { return bytes_.size(); }
  size_t node_count() const { return nodes_.size(); }

  NodeKind kind(NodeId id) const { return is_small(id) ? NodeKind::kInt : nodes_[id].kind; }
  // An int from 0 to 2^31 - 1.
  static bool is_small(NodeId id) { return (id & kSmallFlag) != 0; }
  bool is(NodeId id, NodeKind kind) const { return this->kind(id) == kind; }
  bool boolean(NodeId id) const { return nodes_[id].a != 0; }
  int64_t integer(NodeId id) const {
    return is_small(id) ? static_cast<int64_t>(id & kSmallMask)
                        : static_cast<int64_t>(nodes_[id].wide());
  }
  double floating(NodeId id) const;
  // Of kString, kBytes, kByteArray and kLong.
  std::string_view text(NodeId id) const {
    const Node& node = nodes_[id];
    if (node.has_items) [[unlikely]]
      return std::string_view(made_).substr(node.b, node.a);
    return as_text(bytes_.subspan(node.b, node.a));
  }
  // Of kTuple, kList, kDict, kSet, kFrozenSet.
  std::span<const NodeId> items(NodeId id) const {
    return {children_.data() + nodes_[id].b, nodes_[id].a};
  }
  // Of a kGlobal or kAttribute: the module; of a kGlobal alone: the name.
  std::string_view module(NodeId id) const;
  std::string_view name(NodeId id) const;
  // Of a kGlobal or kAttribute, with dots ("Outer.Inner").
  std::string qualified_name(NodeId id) const;
  // A class or function by name, or inside one.
  bool is_named(NodeId id) const {
    return is(id, NodeKind::kGlobal) || is(id, NodeKind::kAttribute);
  }
  bool is_global(NodeId id, std::string_view module_name, std::string_view global_name) const {
    return is(id, NodeKind::kGlobal) && name(id) == global_name && module(id) == module_name;
  }
  // Of kCall and kNew; a kPersistent has args alone (any node).
  NodeId callable(NodeId id) const { return nodes_[id].a; }
  NodeId args(NodeId id) const { return nodes_[id].b; }
  NodeId state(NodeId id) const { return nodes_[id].c; }  // kNoNode: none was set
  const ObjectItems* object_items(NodeId id) const;       // null: none

 private:
  friend class PickleMachine;
  static constexpr NodeId kSmallFlag = 0x80000000;
  static constexpr NodeId kSmallMask = 0x7fffffff;

  // 16 bytes.   a          b            c
  //  text       length     offset                        has_items: in made_, not in the bytes
  //  container  count      first child  room for so many children
  //  global     module     name         Special, row of Python 2's names << 8
  //  attribute  of what    name         how many attributes deep
  //  object     callable   args         state
  //  number                the 8 bytes in (c, b)
  struct Node {
    NodeKind kind = NodeKind::kNone;
    bool has_items = false;
    uint32_t a = 0;
    uint32_t b = 0;
    uint32_t c = 0;
    uint64_t wide() const { return static_cast<uint64_t>(c) << 32 | b; }
  };
  // Globals that mean something to the machine itself.
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
  std::string made_;  // text that the bytes don't hold as it is (protocols 0 and 1)
  LargeVector<Node> nodes_;
  LargeVector<NodeId> children_;
  std::unordered_map<NodeId, ObjectItems> object_items_;  // rare
  NodeId root_ = kNoNode;
};

}  // namespace tilestone::archive
