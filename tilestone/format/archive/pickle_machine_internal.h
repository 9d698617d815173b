// The machine behind Pickle::parse. Common opcodes are implemented here and in pickle_reader.cc,
// globals and objects in pickle_objects.cc, rare opcodes in pickle_opcodes.cc.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/format/archive/pickle_opcodes_internal.h"
#include "tilestone/format/archive/pickle_reader_internal.h"
#include "tilestone/format/archive/utf8_internal.h"

namespace tilestone::archive {

// Runs once over the bytes. The stack and the memo hold node ids; marks are indices into the stack.
class PickleMachine {
 public:
  PickleMachine(ByteView bytes, Pickle::Sizes sizes)
      : sizes_(sizes),
        begin_(reinterpret_cast<const uint8_t*>(bytes.data())),
        at_(begin_),
        end_(begin_ + bytes.size()) {
    pickle_.bytes_ = bytes;
    if (bytes.size() > std::numeric_limits<uint32_t>::max()) {
      throw Error(ErrorCode::kUnsupported, "the pickle has " + std::to_string(bytes.size()) +
                                               " bytes; at most 4 GiB are supported");
    }
    // This reserves address space. Memory that is never touched costs nothing.
    pickle_.nodes_.reserve(bytes.size() / 8 + 16);
    pickle_.children_.reserve(bytes.size() / 8 + 16);
    memo_.reserve(bytes.size() / 8 + 16);
    pickle_.nodes_.resize(kFirstFree);
    pickle_.nodes_[kNoneNode].kind = NodeKind::kNone;
    pickle_.nodes_[kFalseNode].kind = NodeKind::kBool;
    pickle_.nodes_[kTrueNode] = {NodeKind::kBool, false, 1, 0, 0};
    pickle_.nodes_[kEmptyTupleNode].kind = NodeKind::kTuple;
  }

  Pickle run() {
    execute();
    if (at_ != end_) corrupt("there are bytes after the end of the pickle");
    if (stack_.size() != 1 || !marks_.empty()) {
      corrupt("the pickle does not end with exactly one object on the stack");
    }
    pickle_.root_ = stack_.back();
    return std::move(pickle_);
  }

 private:
  using Node = Pickle::Node;
  static constexpr NodeId kNoneNode = 0;
  static constexpr NodeId kFalseNode = 1;
  static constexpr NodeId kTrueNode = 2;
  static constexpr NodeId kEmptyTupleNode = 3;
  static constexpr size_t kFirstFree = 4;

  // ---- Errors ----

  [[noreturn]] void fail(ErrorCode code, const std::string& problem) const {
    throw Error(code, "pickle: " + problem + " (at byte " + std::to_string(opcode_ - begin_) + ")");
  }
  [[noreturn]] void corrupt(const std::string& problem) const {
    fail(ErrorCode::kCorrupt, problem);
  }
  [[noreturn]] void unsafe(const std::string& problem) const { fail(ErrorCode::kUnsafe, problem); }

  // ---- Operands ----

  const uint8_t* take(uint64_t size) {
    if (static_cast<uint64_t>(end_ - at_) < size) corrupt("the bytes end inside an operand");
    const uint8_t* from = at_;
    at_ += size;
    return from;
  }
  uint8_t u8() { return *take(1); }
  template <typename T>
  T little() {
    static_assert(std::endian::native == std::endian::little);
    T value;
    std::memcpy(&value, take(sizeof(T)), sizeof(T));
    return value;
  }
  std::string_view line() {
    const auto* newline =
        static_cast<const uint8_t*>(std::memchr(at_, '\n', static_cast<size_t>(end_ - at_)));
    if (newline == nullptr) corrupt("a text line of the pickle has no newline at its end");
    const std::string_view text(reinterpret_cast<const char*>(at_),
                                static_cast<size_t>(newline - at_));
    at_ = newline + 1;
    return text;
  }

  // ---- Nodes ----

  NodeId add(const Node& node) {
    pickle_.nodes_.push_back(node);
    return static_cast<NodeId>(pickle_.nodes_.size() - 1);
  }
  void push(NodeId id) { stack_.push_back(id); }
  void push_node(const Node& node) { push(add(node)); }
  Node& node(NodeId id) { return pickle_.nodes_[id]; }

  static Node wide_node(NodeKind kind, uint64_t value) {
    return {kind, false, 0, static_cast<uint32_t>(value), static_cast<uint32_t>(value >> 32)};
  }
  void push_int(int64_t value) {
    if (value >= 0 && value < static_cast<int64_t>(Pickle::kSmallFlag)) {
      push(static_cast<NodeId>(value) | Pickle::kSmallFlag);
    } else {
      push_node(wide_node(NodeKind::kInt, static_cast<uint64_t>(value)));
    }
  }
  Node text_node(NodeKind kind, const uint8_t* from, uint64_t size) const {
    return {kind, false, static_cast<uint32_t>(size), static_cast<uint32_t>(from - begin_), 0};
  }
  void push_text(NodeKind kind, uint64_t size) {
    const uint8_t* from = take(size);
    if (kind == NodeKind::kString && !is_utf8({reinterpret_cast<const char*>(from), size})) {
      corrupt("a string is not UTF-8");
    }
    push_node(text_node(kind, from, size));
  }
  void push_long(uint64_t size) {
    const uint8_t* from = take(size);
    uint64_t value = 0;
    if (size > sizeof(value)) {
      // A small number may be encoded in more bytes than an int64 has; keep the bytes.
      push_node(text_node(NodeKind::kLong, from, size));
      return;
    }
    std::memcpy(&value, from, size);
    if (size > 0 && size < sizeof(value) && (from[size - 1] & 0x80) != 0) {
      value |= ~uint64_t{0} << (8 * size);
    }
    push_int(static_cast<int64_t>(value));
  }

  // ---- Stack ----

  NodeId top() {
    if (stack_.size() <= floor_) corrupt("the stack is empty");
    return stack_.back();
  }
  NodeId pop() {
    const NodeId id = top();
    stack_.pop_back();
    return id;
  }
  void push_mark() {
    floor_ = stack_.size();
    marks_.push_back(floor_);
  }
  size_t pop_mark() {
    if (marks_.empty()) corrupt("there is no mark on the stack");
    const size_t mark = marks_.back();
    marks_.pop_back();
    floor_ = marks_.empty() ? 0 : marks_.back();
    return mark;
  }

  // Moves the stack's entries from `first` on to the end of the children. Returns the index of
  // their first child.
  uint32_t take_children(size_t first) {
    LargeVector<NodeId>& children = pickle_.children_;
    const size_t begin = children.size();
    const size_t count = stack_.size() - first;
    if (begin + count > std::numeric_limits<uint32_t>::max()) {
      corrupt("the containers have too many elements");
    }
    for (size_t i = first; i < stack_.size(); ++i) children.push_back(stack_[i]);
    stack_.resize(first);
    return static_cast<uint32_t>(begin);
  }

  void push_tuple(size_t first) {
    const auto count = static_cast<uint32_t>(stack_.size() - first);
    push_node({NodeKind::kTuple, false, count, take_children(first), count});
  }
  void push_short_tuple(size_t count) {
    if (stack_.size() < floor_ + count) corrupt("the stack is too short for a tuple");
    push_tuple(stack_.size() - count);
  }

  // Reads torch.Size((...)) as the tuple. About half of a metadata file consists of these calls, so
  // the usual opcodes TUPLE1 [MEMOIZE] REDUCE are handled in one step that makes no nodes. The
  // tuple of arguments then has no memo entry; nothing but the call refers to it. Returns false if
  // the opcodes are others; the caller then handles TUPLE1.
  bool fuse_size() {
    const size_t depth = stack_.size();
    if (sizes_ == Pickle::Sizes::kCalls || depth < floor_ + 2) return false;
    if (pickle_.special(stack_[depth - 2]) != Pickle::kSize) return false;
    const bool memoized = end_ - at_ >= 2 && at_[0] == op::kMemoize && at_[1] == op::kReduce;
    if (!memoized && (at_ == end_ || at_[0] != op::kReduce)) return false;
    if (!pickle_.is(stack_[depth - 1], NodeKind::kTuple)) return false;
    if (memoized) memo_.push_back(kNoNode);
    at_ += memoized ? 2 : 1;
    stack_[depth - 2] = stack_[depth - 1];
    stack_.pop_back();
    return true;
  }

  // ---- Filling containers ----

  // Moves the stack's entries from `first` on to the end of a container. If another node's children
  // follow in the arena, the container moves and its capacity doubles, so the total cost is linear.
  void extend(NodeId id, size_t first) {
    Node& target = node(id);
    LargeVector<NodeId>& children = pickle_.children_;
    const auto count = static_cast<uint32_t>(stack_.size() - first);
    if (count == 0) return;
    const uint64_t needed = uint64_t{target.a} + count;
    const bool fresh = target.a == 0;
    if (needed > target.c && (fresh || size_t{target.b} + target.c == children.size())) {
      // Its children are the last in the arena. Drop the unused capacity and append.
      if (!fresh) children.resize(size_t{target.b} + target.a);
      const uint32_t begin = take_children(first);
      if (fresh) target.b = begin;
      target.c = static_cast<uint32_t>(needed);
    } else {
      if (needed > target.c) move_to_larger_room(target, 2 * needed);
      std::copy(stack_.begin() + static_cast<ptrdiff_t>(first), stack_.end(),
                children.begin() + target.b + target.a);
      stack_.resize(first);
    }
    target.a = static_cast<uint32_t>(needed);
  }
  void move_to_larger_room(Node& target, uint64_t room) {
    LargeVector<NodeId>& children = pickle_.children_;
    const size_t begin = children.size();
    if (begin + room > std::numeric_limits<uint32_t>::max()) {
      corrupt("the containers have too many elements");
    }
    children.resize(begin + room);
    std::copy_n(children.begin() + target.b, target.a,
                children.begin() + static_cast<ptrdiff_t>(begin));
    target.b = static_cast<uint32_t>(begin);
    target.c = static_cast<uint32_t>(room);
  }

  bool is_object(NodeId id) const {
    const NodeKind kind = pickle_.kind(id);
    return kind == NodeKind::kCall || kind == NodeKind::kNew;
  }
  ObjectItems& items_of(NodeId object) {
    node(object).has_items = true;
    return pickle_.object_items_[object];
  }
  void add_to_object(std::vector<NodeId>& items, size_t first) {
    items.insert(items.end(), stack_.begin() + static_cast<ptrdiff_t>(first), stack_.end());
    stack_.resize(first);
  }
  NodeId target_below(size_t first) {
    if (first <= floor_) corrupt("there is no container below the items on the stack");
    return stack_[first - 1];
  }
  void append(size_t first) {
    const NodeId target = target_below(first);
    if (pickle_.is(target, NodeKind::kList)) {
      extend(target, first);
    } else if (is_object(target)) {
      add_to_object(items_of(target).appended, first);
    } else {
      unsafe("items are appended to something that is not a list or an object");
    }
  }
  void set_items(size_t first) {
    if ((stack_.size() - first) % 2 != 0) corrupt("a key has no value");
    const NodeId target = target_below(first);
    if (pickle_.is(target, NodeKind::kDict)) {
      extend(target, first);
    } else if (is_object(target)) {
      add_to_object(items_of(target).entries, first);
    } else {
      unsafe("items are set on something that is not a dict or an object");
    }
  }
  void add_items(size_t first) {
    const NodeId target = target_below(first);
    if (!pickle_.is(target, NodeKind::kSet)) {
      unsafe("items are added to something that is not a set");
    }
    extend(target, first);
  }
  size_t last(size_t count) {
    if (stack_.size() < floor_ + count) corrupt("the stack is too short");
    return stack_.size() - count;
  }

  // ---- Globals and objects (pickle_objects.cc) ----

  void push_global_line();
  void push_global(NodeId module, NodeId name);
  void push_stack_global();
  void push_object(NodeKind kind);
  void push_made(NodeKind kind, NodeId callable, NodeId args, NodeId keywords = kNoNode);
  bool push_special_call(NodeId callable, NodeId args);
  bool push_attribute(NodeId owner, NodeId name);
  bool push_partial_new(NodeId partial);
  void push_object_with_keywords();
  NodeId rest_of(NodeId tuple);
  NodeId named(std::string_view text);
  void build();

  // ---- Memo ----

  void put(uint64_t index) {
    // A pickler numbers its memo entries consecutively, and each takes at least two bytes of input.
    if (index > static_cast<uint64_t>(end_ - begin_)) corrupt("a memo index is too large");
    if (index >= memo_.size()) memo_.resize(index + 1, kNoNode);
    memo_[index] = top();
  }
  void get(uint64_t index) {
    if (index >= memo_.size() || memo_[index] == kNoNode) corrupt("a memo index has not been set");
    push(memo_[index]);
  }

  // ---- Opcodes ----

  void execute();
  void rare(uint8_t opcode);  // pickle_opcodes.cc
  void push_python2_text(uint64_t size);

  Pickle::Sizes sizes_;
  uint8_t protocol_ = 0;
  const uint8_t* begin_;
  const uint8_t* at_;
  const uint8_t* end_;
  const uint8_t* opcode_ = nullptr;  // the current opcode, for errors
  Pickle pickle_;
  std::vector<NodeId> stack_;
  std::vector<size_t> marks_;
  size_t floor_ = 0;  // the last mark; entries below it can't be popped before the mark
  LargeVector<NodeId> memo_;
};

}  // namespace tilestone::archive
