#include "tilestone/engine/read/as_stored_internal.h"

#include <algorithm>
#include <string>
#include <utility>

#include "tilestone/base/error.h"

namespace tilestone::engine {
namespace {

class Replacer {
 public:
  Replacer(const Metadata& stored, KindsByKey& replaced) : stored_(stored), replaced_(replaced) {}

  void visit(StateDict& dict, const std::string& key) {
    for (auto& [element, node] : dict.entries()) visit(node, below(key, key_text(element)));
  }

 private:
  static std::string below(const std::string& key, const std::string& element) {
    return key.empty() ? element : key + "." + element;
  }

  bool is_object(const std::string& key) const {
    return stored_.find_object(key) != nullptr && stored_.find_tensor(key) == nullptr;
  }

  // Whether a dict holds nothing but values, none of which is stored under its own key. PyTorch up
  // to 2.3 saved such a dict as one object.
  bool is_stored_nowhere(const StateDict& dict, const std::string& key) const {
    return std::all_of(dict.begin(), dict.end(), [&](const StateDict::Entry& entry) {
      return is_stored_nowhere(entry.second, below(key, key_text(entry.first)));
    });
  }

  bool is_stored_nowhere(const StateNode& node, const std::string& key) const {
    if (const auto* dict = node.get_if<StateDict>()) return is_stored_nowhere(*dict, key);
    if (stored_.find_object(key) != nullptr || stored_.find_tensor(key) != nullptr) return false;
    if (node.get_if<Value>() != nullptr) return true;
    const auto* list = node.get_if<StateList>();
    if (list == nullptr) return false;
    for (size_t i = 0; i < list->size(); ++i) {
      if (!is_stored_nowhere((*list)[i], below(key, std::to_string(i)))) return false;
    }
    return true;
  }

  void visit(StateNode& node, const std::string& key) {
    if (auto* dict = node.get_if<StateDict>()) {
      if (is_object(key) && is_stored_nowhere(*dict, key)) {
        node = Value();
        replaced_.emplace(key, Value::Kind::kDict);
      } else {
        visit(*dict, key);
      }
    } else if (node.get_if<TensorView>() != nullptr) {
      if (is_object(key)) node = Value();
    } else if (auto* list = node.get_if<StateList>()) {
      if (is_object(key)) {
        if (!list->empty()) replaced_.emplace(key, Value::Kind::kList);
        node = Value();
        return;
      }
      for (size_t i = 0; i < list->size(); ++i) visit((*list)[i], below(key, std::to_string(i)));
    }
  }

  const Metadata& stored_;
  KindsByKey& replaced_;
};

bool is_of_kind(const Value& value, Value::Kind kind) {
  using Kind = Value::Kind;
  switch (value.kind()) {
    case Kind::kOpaque:
    case Kind::kPickled:
      return true;  // of a class that may be a dict or a list
    case Kind::kTuple:
      return kind == Kind::kList;
    default:
      return value.kind() == kind;
  }
}

}  // namespace

StateDict as_stored(StateDict wanted, const Metadata& stored, KindsByKey& replaced) {
  if (!stored.objects.empty()) Replacer(stored, replaced).visit(wanted, "");
  return wanted;
}

void expect_kind(const ObjectItem& item, Value::Kind kind) {
  if (is_of_kind(item.value, kind)) return;
  throw Error(ErrorCode::kMismatch, "the template has a " + std::string(to_string(kind)) +
                                        " under this key, and the checkpoint a " +
                                        std::string(to_string(item.value.kind())))
      .with_key(item.key)
      .with_hint("None in the template's place loads what is stored, of any kind");
}

}  // namespace tilestone::engine
