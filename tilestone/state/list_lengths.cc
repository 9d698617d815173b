#include "tilestone/state/list_lengths.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "tilestone/base/both_ways.h"
#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/base/size_text.h"

namespace tilestone {
namespace {

constexpr size_t kMaxDepth = 16;
constexpr size_t kMaxLists = 4096;

// What is below a node.
struct Below {
  bool common = false;
  bool sharded = false;
  bool descended = false;  // the node makes a list around it one that is taken apart

  void add(const Below& other) {
    common |= other.common;
    sharded |= other.sharded;
    descended |= other.descended;
  }
};

class Finder {
 public:
  Below visit(const StateDict& dict, size_t depth) {
    Below below{dict.empty(), false, true};
    for (const auto& [key, node] : dict.entries()) {
      at(key_text(key), [&] { below.add(visit(node, depth + 1)); });
    }
    if (!dict.others().empty()) below.common = true;
    return below;
  }

  std::vector<ListLength> take() { return std::move(lists_); }

 private:
  Below visit(const StateNode& node, size_t depth) {
    return std::visit([&](const auto& content) { return visit(content, depth); }, node.variant());
  }
  Below visit(const StateList& list, size_t depth) { return elements(list, depth); }
  Below visit(const Value& value, size_t depth) {
    if (value.kind() == Value::Kind::kList) return elements(value.items(), depth);
    const bool is_dict = value.kind() == Value::Kind::kDict;
    if (is_dict && depth < kMaxDepth) {
      for (const auto& [key, item] : value.as_dict()) {
        at(key.kind() == Value::Kind::kString ? key.as_string() : to_string(key, kKeyText),
           [&] { visit(item, depth + 1); });
      }
    }
    return {true, false, is_dict || value.kind() == Value::Kind::kTensor};
  }
  Below visit(const TensorView&, size_t) { return {true, false, true}; }
  Below visit(const ShardedTensor& tensor, size_t) { return {tensor.common, !tensor.common, true}; }
  Below visit(const ShardedObject&, size_t) { return {false, true, true}; }
  Below visit(const ShardedTensorFactory&, size_t) { return {}; }
  Below visit(const LocalNonpersistent&, size_t) { return {}; }

  static uint64_t dropped_of(const StateList& list) {
    return static_cast<uint64_t>(std::count_if(list.begin(), list.end(), [](const StateNode& node) {
      return node.get_if<LocalNonpersistent>() != nullptr;
    }));
  }
  static uint64_t dropped_of(const Value::List&) { return 0; }

  template <typename List>
  Below elements(const List& list, size_t depth) {
    Below below;
    const uint64_t dropped = dropped_of(list);
    const uint64_t length = list.size() - dropped;
    below.common = length == 0;
    if (depth >= kMaxDepth || lists_.size() >= kMaxLists) return {true, false, false};
    const size_t own = lists_.size();
    lists_.push_back({path_, length, dropped});
    for (size_t i = 0; i < list.size(); ++i) {
      at(std::to_string(i), [&] { below.add(visit(list[i], depth + 1)); });
    }
    if (!below.descended) lists_.resize(own + 1);  // lists inside it are a part of its value
    lists_[own].has_common = below.common && length > 0;
    lists_[own].has_sharded = below.sharded;
    lists_[own].is_descended = below.descended;
    return below;
  }

  template <typename Body>
  void at(const std::string& element, const Body& body) {
    const size_t size = path_.size();
    if (size > 0) path_ += '.';
    path_ += element;
    body();
    path_.resize(size);
  }

  static constexpr size_t kKeyText = 40;

  std::string path_;
  std::vector<ListLength> lists_;
};

// Lists of the same path on several ranks.
struct SamePath {
  bool has_common = false;
  bool is_taken_apart = false;
  std::map<uint64_t, std::vector<int>> ranks;  // by length
  std::set<uint64_t> with_dropped;             // the lengths with what is not saved
};

[[noreturn]] void refuse(const std::string& path, const SamePath& list) {
  std::string problem = "a list with common values does not have the same length on all ranks:";
  for (const auto& [length, ranks] : list.ranks) {
    problem +=
        (problem.back() == ':' ? " " : ", ") + std::to_string(length) + " on " + ranks_text(ranks);
  }
  throw Error(ErrorCode::kMismatch, problem + "; its values could not be given back")
      .with_key(path)
      .with_rank(list.ranks.rbegin()->second.front())
      .with_hint(
          "keep common values out of lists of different lengths, or use a dict whose keys say what "
          "is meant; lists of sharded entities alone may differ");
}

}  // namespace

std::vector<ListLength> list_lengths(const StateDict& state) {
  Finder finder;
  finder.visit(state, 0);
  return finder.take();
}

uint64_t hash_of(const std::vector<ListLength>& lists) {
  ByteWriter out;
  for (const ListLength& list : lists) {
    if (!list.has_common) continue;
    out.string(list.path);
    out.varint(list.length);
    out.varint(list.dropped);
  }
  return out.size() == 0 ? 0 : std::max<uint64_t>(xxh3_64(out.bytes()), 1);
}

namespace {

void walk_lengths(auto& io, auto& lists) {
  both::each(io, lists, 4, [&](auto& list) {
    both::text(io, list.path);
    both::varint(io, list.length);
    both::varint(io, list.dropped);
    both::flags(io, list.has_common, list.has_sharded, list.is_descended);
  });
}

}  // namespace

void walk_lists(ByteWriter& out, const std::vector<ListLength>& lists) { walk_lengths(out, lists); }
void walk_lists(ByteReader& in, std::vector<ListLength>& lists) { walk_lengths(in, lists); }

void expect_same_lengths(const std::vector<std::vector<ListLength>>& by_rank, bool by_sharded) {
  std::map<std::string_view, SamePath> paths;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    for (const ListLength& list : by_rank[rank]) {
      SamePath& same = paths[list.path];
      same.has_common |= list.has_common;
      same.is_taken_apart |= by_sharded ? list.has_sharded : list.is_descended;
      same.ranks[list.length].push_back(static_cast<int>(rank));
      same.with_dropped.insert(list.length + list.dropped);
    }
  }
  for (const auto& [path, list] : paths) {
    const bool differs = list.ranks.size() > 1 && list.with_dropped.size() > 1;
    if (list.has_common && list.is_taken_apart && differs) refuse(std::string(path), list);
  }
}

}  // namespace tilestone
