// Rare opcodes.
#include "tilestone/format/archive/pickle_machine_internal.h"

namespace tilestone::archive {
void PickleMachine::rare(uint8_t opcode) {
  switch (opcode) {
    case op::kProto: {
      protocol_ = u8();
      if (protocol_ > 5) {
        fail(ErrorCode::kUnsupported,
             "protocol " + std::to_string(protocol_) + " is not supported");
      }
      break;
    }
    case op::kFrame:
      if (little<uint64_t>() > static_cast<uint64_t>(end_ - at_)) {
        corrupt("a frame reaches beyond the end of the pickle");
      }
      break;
    case op::kBinFloat: {
      const auto bits = __builtin_bswap64(little<uint64_t>());
      push_node(wide_node(NodeKind::kFloat, bits));
      break;
    }
    case op::kLong4: {
      const auto size = little<int32_t>();
      if (size < 0) corrupt("a length is negative");
      push_long(static_cast<uint64_t>(size));
      break;
    }
    case op::kBinUnicode8:
      push_text(NodeKind::kString, little<uint64_t>());
      break;
    case op::kShortBinBytes:
      push_text(NodeKind::kBytes, u8());
      break;
    case op::kBinBytes:
      push_text(NodeKind::kBytes, little<uint32_t>());
      break;
    case op::kBinBytes8:
      push_text(NodeKind::kBytes, little<uint64_t>());
      break;
    case op::kByteArray8:
      push_text(NodeKind::kByteArray, little<uint64_t>());
      break;
    case op::kEmptySet:
      push_node({NodeKind::kSet, false, 0, 0, 0});
      break;
    case op::kAddItems:
      add_items(pop_mark());
      break;
    case op::kFrozenSet:
      push_tuple(pop_mark());
      node(stack_.back()).kind = NodeKind::kFrozenSet;
      break;
    case op::kBinPersId:
      push_node({NodeKind::kPersistent, false, kNoNode, pop(), kNoNode});
      break;
    case op::kNewObjEx:
      push_object_with_keywords();
      break;
    case op::kPop:
      if (stack_.size() > floor_) {
        stack_.pop_back();
      } else {
        pop_mark();  // as in Python, POP removes a mark that is on top
      }
      break;
    case op::kDup:
      push(top());
      break;
    case op::kPopMark:
      stack_.resize(pop_mark());
      break;
    case op::kBinString:
    case op::kShortBinString: {
      const int64_t size = opcode == op::kBinString ? little<int32_t>() : u8();
      if (size < 0) corrupt("a length is negative");
      push_python2_text(static_cast<uint64_t>(size));
      break;
    }
    case op::kExt1:
    case op::kExt2:
    case op::kExt4:
      unsafe("a class is named by an extension code, whose meaning only the writer knows");
    case op::kNextBuffer:
    case op::kReadonlyBuffer:
      fail(ErrorCode::kUnsupported, "buffers outside the pickle are not supported");
    default:
      if (op::kOfProtocols0And1.find(static_cast<char>(opcode)) != std::string_view::npos) {
        fail(ErrorCode::kUnsupported, "opcodes of protocols 0 and 1 are not supported");
      }
      corrupt("byte " + std::to_string(opcode) + " is not an opcode");
  }
}

// A str of Python 2: a string if it is UTF-8, else bytes.
void PickleMachine::push_python2_text(uint64_t size) {
  const uint8_t* from = take(size);
  const bool is_text = is_utf8({reinterpret_cast<const char*>(from), size});
  push_node(text_node(is_text ? NodeKind::kString : NodeKind::kBytes, from, size));
}

}  // namespace tilestone::archive
