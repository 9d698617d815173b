#include "tilestone/state/content_parts.h"

#include <unordered_map>
#include <utility>

#include "tilestone/state/content_hash.h"

namespace tilestone {
namespace {

constexpr size_t kTextLimit = 40;  // bytes
constexpr size_t kMaxShapeDepth = 100;

// Whether the value is an object described by its class and a dict of attributes.
bool has_attributes(const Value& value) {
  return value.kind() == Value::Kind::kOpaque && value.as_opaque().has_state &&
         value.as_opaque().state.kind() == Value::Kind::kDict;
}

class PartFinder {
 public:
  explicit PartFinder(size_t most) : most_(most) {}

  void visit(const Value& value, const std::string& path, size_t depth) {
    if (parts_.size() < most_ && depth < kMaxShapeDepth) {
      if (value.kind() == Value::Kind::kDict) return dict(value, path, depth);
      if (value.kind() == Value::Kind::kList || value.kind() == Value::Kind::kTuple) {
        return list(value, path, depth);
      }
      if (has_attributes(value)) return object(value.as_opaque(), path, depth);
    }
    parts_.push_back({path, content_hash(value), to_string(value, kTextLimit)});
  }

  std::vector<ContentPart> take() { return std::move(parts_); }

 private:
  static std::string below(const std::string& path, const std::string& element) {
    return path.empty() ? element : path + "." + element;
  }

  // The order of the keys is part of an OrderedDict's content.
  void dict(const Value& value, const std::string& path, size_t depth) {
    Value::List own = {value.is_ordered_dict(), value.attributes()};
    for (const auto& [key, item] : value.as_dict()) {
      if (value.is_ordered_dict()) own.push_back(key);
    }
    container(Value::tuple(std::move(own)), value, path);
    for (const auto& [key, item] : value.as_dict()) {
      const bool is_text = key.kind() == Value::Kind::kString;
      visit(item, below(path, is_text ? key.as_string() : to_string(key)), depth + 1);
    }
  }

  void list(const Value& value, const std::string& path, size_t depth) {
    container(Value(std::string(to_string(value.kind()))), value, path);
    for (size_t i = 0; i < value.items().size(); ++i) {
      visit(value.items()[i], below(path, std::to_string(i)), depth + 1);
    }
  }

  void object(const Opaque& opaque, const std::string& path, size_t depth) {
    Opaque without = opaque;
    without.state = Value();
    container(Value(std::move(without)), Value(opaque.module + "." + opaque.name), path);
    visit(opaque.state, path, depth + 1);
  }

  void container(const Value& own, const Value& shown, const std::string& path) {
    parts_.push_back({path, content_hash(own), to_string(shown, kTextLimit)});
  }

  const size_t most_;
  std::vector<ContentPart> parts_;
};

// Parts by path and number. The number distinguishes parts with the same path, which a key with a
// dot in it can cause.
using ByPath = std::unordered_map<std::string, const ContentPart*>;

std::vector<std::string> numbered_paths(const std::vector<ContentPart>& parts) {
  std::unordered_map<std::string_view, size_t> seen;
  std::vector<std::string> paths;
  for (const ContentPart& part : parts) {
    paths.push_back(part.path + '\0' + std::to_string(seen[part.path]++));
  }
  return paths;
}

ByPath by_path(const std::vector<ContentPart>& parts) {
  ByPath found;
  const std::vector<std::string> paths = numbered_paths(parts);
  for (size_t i = 0; i < parts.size(); ++i) found.emplace(paths[i], &parts[i]);
  return found;
}

}  // namespace

std::vector<ContentPart> content_parts(const Value& value, size_t most) {
  PartFinder finder(most);
  finder.visit(value, "", 0);
  return finder.take();
}

std::vector<ContentDifference> find_differences(const std::vector<ContentPart>& a,
                                                const std::vector<ContentPart>& b) {
  std::vector<ContentDifference> found;
  const ByPath of_a = by_path(a), of_b = by_path(b);
  const std::vector<std::string> paths_a = numbered_paths(a), paths_b = numbered_paths(b);
  // Prefix of the paths below the last path that only one value has. No path begins with '\0'.
  std::string lacking(1, '\0');
  const auto add = [&](const std::string& path, const ContentPart* in_a, const ContentPart* in_b) {
    if (!found.empty() && found.back().path == path) return;
    if (path.starts_with(lacking)) return;
    if (in_a == nullptr || in_b == nullptr) lacking = path + ".";
    found.push_back(
        {path, in_a != nullptr ? in_a->text : "nothing", in_b != nullptr ? in_b->text : "nothing"});
  };
  for (size_t i = 0; i < a.size(); ++i) {
    const auto other = of_b.find(paths_a[i]);
    if (other == of_b.end()) {
      add(a[i].path, &a[i], nullptr);
    } else if (other->second->hash != a[i].hash) {
      add(a[i].path, &a[i], other->second);
    }
  }
  for (size_t i = 0; i < b.size(); ++i) {
    if (!of_a.contains(paths_b[i])) add(b[i].path, nullptr, &b[i]);
  }
  return found;
}

}  // namespace tilestone
