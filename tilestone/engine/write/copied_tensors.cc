#include <algorithm>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tilestone/engine/write/stage_internal.h"
#include "tilestone/geometry/strided_copy.h"
#include "tilestone/state/value_children.h"

namespace tilestone::engine {
namespace {

// The replacement of a value; nullopt if the value is kept.
using Made = std::optional<Value>;

Value copy_of(const TensorView& tensor, const Autograd& autograd) {
  TensorView own = TensorView::allocate(tensor.dtype, tensor.shape);
  if (tensor.bytes() > 0) pack_range(tensor.strided_view(), 0, {own.data, own.bytes()});
  return Value(std::move(own), autograd);
}

// Hands out the children of a value, in the order of for_each_child().
class Children {
 public:
  explicit Children(std::vector<Value> children) : children_(std::move(children)) {}
  Value next() { return std::move(children_[at_++]); }
  Value::List list(size_t count) {
    Value::List items;
    for (; count > 0; --count) items.push_back(next());
    return items;
  }
  Value::Dict dict(size_t count) {
    Value::Dict entries;
    for (; count > 0; --count) {
      Value key = next();
      entries.emplace_back(std::move(key), next());
    }
    return entries;
  }

 private:
  std::vector<Value> children_;
  size_t at_ = 0;
};

Value rebuilt(const Value& value, Children children) {
  switch (value.kind()) {
    case Value::Kind::kList:
      return Value::list(children.list(value.items().size()));
    case Value::Kind::kTuple:
      return Value::tuple(children.list(value.items().size()));
    case Value::Kind::kDict: {
      Value::Dict entries = children.dict(value.as_dict().size());
      if (!value.is_ordered_dict()) return Value::dict(std::move(entries));
      return Value::ordered_dict(std::move(entries), children.next());
    }
    default: {
      const Opaque& old = value.as_opaque();
      Opaque made{old.kind, old.module, old.name};
      made.has_state = old.has_state;
      made.args = children.list(old.args.size());
      made.keywords = children.dict(old.keywords.size());
      made.state = children.next();
      made.appended = children.list(old.appended.size());
      made.entries = children.dict(old.entries.size());
      return Value(std::move(made));
    }
  }
}

// Copies children before parents. Uses an explicit stack, because values may be nested to any
// depth.
class Copier {
 public:
  Made copy(const Value& root) {
    open(root);
    for (;;) {
      Frame& top = stack_.back();
      if (top.made.size() < top.children.size()) {
        visit(top);
        continue;
      }
      Made done = close(top);
      stack_.pop_back();
      if (stack_.empty()) return done;
      stack_.back().made.push_back(std::move(done));
    }
  }

 private:
  struct Frame {
    const Value* value;
    std::vector<const Value*> children;
    std::vector<Made> made;  // the results for the children that are done
  };

  void open(const Value& value) {
    stack_.push_back({&value, {}, {}});
    std::vector<const Value*>& children = stack_.back().children;
    for_each_child(value, [&](const Value& child) { children.push_back(&child); });
  }

  void visit(Frame& top) {
    const Value& child = *top.children[top.made.size()];
    const auto known = known_.find(child.shared_id());
    if (child.shared_id() == nullptr || known == known_.end()) return open(child);
    top.made.push_back(known->second);
  }

  Made close(const Frame& frame) {
    const Value& value = *frame.value;
    Made done;
    if (value.kind() == Value::Kind::kTensor) {
      done = copy_of(value.as_tensor(), value.autograd());
    } else if (std::any_of(frame.made.begin(), frame.made.end(),
                           [](const Made& made) { return made.has_value(); })) {
      std::vector<Value> children;
      for (size_t i = 0; i < frame.made.size(); ++i) {
        children.push_back(frame.made[i] ? *frame.made[i] : *frame.children[i]);
      }
      done = rebuilt(value, Children(std::move(children)));
    }
    if (value.shared_id() != nullptr) known_.emplace(value.shared_id(), done);
    return done;
  }

  std::vector<Frame> stack_;
  std::unordered_map<const void*, Made> known_;
};

}  // namespace

Value with_copied_tensors(const Value& value) {
  Made made = Copier().copy(value);
  return made ? std::move(*made) : value;
}

}  // namespace tilestone::engine
