// Globals and objects. Different encodings of the same thing are normalised here, so that the code
// that reads the nodes has to know only one.
#include "tilestone/format/archive/pickle_machine_internal.h"
#include "tilestone/format/archive/python2_names_internal.h"

namespace tilestone::archive {
namespace {

constexpr uint32_t kMaxAttributes = 16;  // nesting depth: classes inside classes

}  // namespace

// ---- Globals ----

Pickle::Special Pickle::special_of(std::string_view module, std::string_view name) {
  if (module == "torch") return name == "Size" ? kSize : kOrdinary;
  if (module == "builtins") return name == "getattr" ? kGetattr : kOrdinary;
  if (module == "functools") return name == "partial" ? kPartial : kOrdinary;
  if (module != "copyreg") return kOrdinary;
  if (name == "__newobj__") return kNewobj;
  if (name == "__newobj_ex__") return kNewobjEx;
  return name == "_reconstructor" ? kReconstructor : kOrdinary;
}

std::string_view Pickle::module(NodeId id) const {
  while (is(id, NodeKind::kAttribute)) id = nodes_[id].a;
  const uint32_t row = nodes_[id].c >> 8;
  return row == 0 ? text(nodes_[id].a) : python3_name(row, {}).module;
}

std::string_view Pickle::name(NodeId id) const {
  const uint32_t row = nodes_[id].c >> 8;
  const std::string_view own = text(nodes_[id].b);
  return row == 0 || is(id, NodeKind::kAttribute) ? own : python3_name(row, own).name;
}

std::string Pickle::qualified_name(NodeId id) const {
  std::string full;
  for (; is(id, NodeKind::kAttribute); id = nodes_[id].a) {
    full.insert(0, "." + std::string(text(nodes_[id].b)));
  }
  return full.insert(0, name(id));
}

NodeId PickleMachine::named(std::string_view text) {
  if (!is_utf8(text)) corrupt("a name is not UTF-8");
  return add(
      text_node(NodeKind::kString, reinterpret_cast<const uint8_t*>(text.data()), text.size()));
}

void PickleMachine::push_global_line() {
  const NodeId module = named(line());
  const NodeId name = named(line());
  push_global(module, name);
}

void PickleMachine::push_global(NodeId module, NodeId name) {
  GlobalName global{pickle_.text(module), pickle_.text(name)};
  uint32_t row = 0;
  if (protocol_ < 3) row = python2_row(global);
  if (row != 0) global = python3_name(row, global.name);
  push_node({NodeKind::kGlobal, false, module, name,
             row << 8 | Pickle::special_of(global.module, global.name)});
}

void PickleMachine::push_stack_global() {
  const NodeId name = pop();
  const NodeId module = pop();
  if (!pickle_.is(name, NodeKind::kString) || !pickle_.is(module, NodeKind::kString)) {
    unsafe("the module or the name of a global is not a string");
  }
  push_global(module, name);
}

// ---- Objects ----

// The tuple without its first element. The two share the other elements, which is safe because
// nothing is ever added to a tuple.
NodeId PickleMachine::rest_of(NodeId tuple) {
  const Node& whole = node(tuple);
  return add({NodeKind::kTuple, false, whole.a - 1, whole.b + 1, whole.c - 1});
}

void PickleMachine::push_made(NodeKind kind, NodeId callable, NodeId args, NodeId keywords) {
  push_node({kind, false, callable, args, kNoNode});
  if (keywords == kNoNode || pickle_.items(keywords).empty()) return;
  const auto entries = pickle_.items(keywords);
  for (size_t i = 0; i < entries.size(); i += 2) {
    if (!pickle_.is(entries[i], NodeKind::kString)) unsafe("a keyword is not a string");
  }
  items_of(stack_.back()).keywords = keywords;
}

void PickleMachine::push_object(NodeKind kind) {
  const NodeId args = pop();
  const NodeId callable = pop();
  if (!pickle_.is(args, NodeKind::kTuple)) unsafe("the arguments of a call are not a tuple");
  if (pickle_.is_named(callable)) {
    if (kind == NodeKind::kCall && push_special_call(callable, args)) return;
    return push_made(kind, callable, args);
  }
  const bool partial = kind == NodeKind::kCall && pickle_.items(args).empty();
  if (partial && push_partial_new(callable)) return;
  unsafe("a call of something that is not a class or function by name");
}

// Handles calls of functions that picklers of old protocols use to encode something else. Returns
// false if the call is not one of these.
bool PickleMachine::push_special_call(NodeId callable, NodeId args) {
  const auto parts = pickle_.items(args);
  switch (pickle_.special(callable)) {
    case Pickle::kSize:
      if (sizes_ == Pickle::Sizes::kCalls || parts.size() != 1) return false;
      if (!pickle_.is(parts[0], NodeKind::kTuple)) return false;
      push(parts[0]);
      return true;
    case Pickle::kGetattr:
      return parts.size() == 2 && push_attribute(parts[0], parts[1]);
    case Pickle::kNewobj:
      if (parts.empty() || !pickle_.is_named(parts[0])) return false;
      push_made(NodeKind::kNew, parts[0], rest_of(args));
      return true;
    case Pickle::kNewobjEx:
      if (parts.size() != 3 || !pickle_.is_named(parts[0]) ||
          !pickle_.is(parts[1], NodeKind::kTuple) || !pickle_.is(parts[2], NodeKind::kDict)) {
        return false;
      }
      push_made(NodeKind::kNew, parts[0], parts[1], parts[2]);
      return true;
    case Pickle::kReconstructor:  // (class, object, None): the class extends only object
      if (parts.size() != 3 || !pickle_.is_named(parts[0]) ||
          !pickle_.is_global(parts[1], "builtins", "object") ||
          !pickle_.is(parts[2], NodeKind::kNone)) {
        return false;
      }
      push_made(NodeKind::kNew, parts[0], kEmptyTupleNode);
      return true;
    default:
      return false;
  }
}

// Handles getattr(Outer, "Inner"), by which protocols below 4 encode a class inside another class.
bool PickleMachine::push_attribute(NodeId owner, NodeId name) {
  if (!pickle_.is_named(owner) || !pickle_.is(name, NodeKind::kString)) return false;
  const std::string_view text = pickle_.text(name);
  if (text.empty() || text.find('.') != std::string_view::npos) return false;
  const uint32_t depth = pickle_.is(owner, NodeKind::kAttribute) ? node(owner).c + 1 : 1;
  if (depth > kMaxAttributes) unsafe("attributes are nested too deep");
  push_node({NodeKind::kAttribute, false, owner, name, depth});
  return true;
}

// Handles functools.partial(cls.__new__, cls, *args, **keywords)(), by which protocols 2 and 3
// encode an object that is made with keyword arguments. The state of a partial is
// (function, args, keywords, attributes).
bool PickleMachine::push_partial_new(NodeId partial) {
  if (!pickle_.is(partial, NodeKind::kCall)) return false;
  if (pickle_.special(pickle_.callable(partial)) != Pickle::kPartial) return false;
  const NodeId state = pickle_.state(partial);
  if (state == kNoNode || !pickle_.is(state, NodeKind::kTuple)) return false;
  const auto parts = pickle_.items(state);
  if (parts.size() != 4 || !pickle_.is(parts[0], NodeKind::kAttribute)) return false;
  const NodeId made = node(parts[0]).a;
  if (pickle_.name(parts[0]) != "__new__" || !pickle_.is(parts[1], NodeKind::kTuple)) return false;
  const auto args = pickle_.items(parts[1]);  // the first is the class
  const bool keywords = pickle_.is(parts[2], NodeKind::kDict);
  if (args.empty() || args[0] != made) return false;  // picklers memoise the class
  if (!keywords && !pickle_.is(parts[2], NodeKind::kNone)) return false;
  push_made(NodeKind::kNew, made, rest_of(parts[1]), keywords ? parts[2] : kNoNode);
  return true;
}

void PickleMachine::push_object_with_keywords() {
  const NodeId keywords = pop();
  const NodeId args = pop();
  const NodeId callable = pop();
  if (!pickle_.is(keywords, NodeKind::kDict)) unsafe("the keyword arguments are not a dict");
  if (!pickle_.is(args, NodeKind::kTuple)) unsafe("the arguments of a call are not a tuple");
  if (!pickle_.is_named(callable)) {
    unsafe("a call of something that is not a class or function by name");
  }
  push_made(NodeKind::kNew, callable, args, keywords);
}

void PickleMachine::build() {
  const NodeId state = pop();
  const NodeId target = top();
  if (!is_object(target)) unsafe("a state is set on something that is not an object");
  if (node(target).c != kNoNode) unsafe("the state of an object is set twice");
  node(target).c = state;
}

}  // namespace tilestone::archive
