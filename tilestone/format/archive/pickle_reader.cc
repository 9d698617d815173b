#include "tilestone/format/archive/pickle_reader_internal.h"

#include <bit>

#include "tilestone/format/archive/pickle_machine_internal.h"

namespace tilestone::archive {

// Executes all opcodes up to STOP in one loop. A function call per opcode would take as much time
// as most opcodes.
void PickleMachine::execute() {
  for (;;) {
    opcode_ = at_;
    switch (const uint8_t opcode = u8()) {
      case op::kStop:
        return;
      case op::kMark:
        push_mark();
        break;
      case op::kMemoize:
        memo_.push_back(top());
        break;
      case op::kBinGet:
        get(u8());
        break;
      case op::kLongBinGet:
        get(little<uint32_t>());
        break;
      case op::kBinPut:
        put(u8());
        break;
      case op::kLongBinPut:
        put(little<uint32_t>());
        break;
      case op::kNone:
        push(kNoneNode);
        break;
      case op::kNewTrue:
        push(kTrueNode);
        break;
      case op::kNewFalse:
        push(kFalseNode);
        break;
      case op::kBinInt:
        push_int(little<int32_t>());
        break;
      case op::kBinInt1:
        push_int(u8());
        break;
      case op::kBinInt2:
        push_int(little<uint16_t>());
        break;
      case op::kLong1:
        push_long(u8());
        break;
      case op::kShortBinUnicode:
        push_text(NodeKind::kString, u8());
        break;
      case op::kBinUnicode:
        push_text(NodeKind::kString, little<uint32_t>());
        break;
      case op::kEmptyDict:
        push_node({NodeKind::kDict, false, 0, 0, 0});
        break;
      case op::kEmptyList:
        push_node({NodeKind::kList, false, 0, 0, 0});
        break;
      case op::kEmptyTuple:
        push(kEmptyTupleNode);
        break;
      case op::kTuple:
        push_tuple(pop_mark());
        break;
      case op::kTuple1:
        if (!fuse_size()) push_short_tuple(1);
        break;
      case op::kTuple2:
        push_short_tuple(2);
        break;
      case op::kTuple3:
        push_short_tuple(3);
        break;
      case op::kAppend:
        append(last(1));
        break;
      case op::kAppends:
        append(pop_mark());
        break;
      case op::kSetItem:
        set_items(last(2));
        break;
      case op::kSetItems:
        set_items(pop_mark());
        break;
      case op::kGlobal:
        push_global_line();
        break;
      case op::kStackGlobal:
        push_stack_global();
        break;
      case op::kReduce:
        push_object(NodeKind::kCall);
        break;
      case op::kNewObj:
        push_object(NodeKind::kNew);
        break;
      case op::kBuild:
        build();
        break;
      default:
        rare(opcode);
        break;
    }
    // Picklers write MEMOIZE after every second opcode, so it is handled without another iteration.
    if (at_ != end_ && *at_ == op::kMemoize) {
      opcode_ = at_++;
      memo_.push_back(top());
    }
  }
}

Pickle Pickle::parse(ByteView bytes, Sizes sizes) { return PickleMachine(bytes, sizes).run(); }

double Pickle::floating(NodeId id) const { return std::bit_cast<double>(nodes_[id].wide()); }

const ObjectItems* Pickle::object_items(NodeId id) const {
  if (!nodes_[id].has_items) return nullptr;
  return &object_items_.at(id);
}

}  // namespace tilestone::archive
