// What must hold for a name to be written.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace tilestone {

class Condition {
 public:
  Condition() = default;  // always
  static Condition always() { return {}; }
  static Condition absent() { return {Kind::kAbsent, ""}; }
  // The name still has this tag (FileInfo::tag), which must not be empty.
  static Condition has(std::string tag) { return {Kind::kTag, std::move(tag)}; }

  bool is_always() const { return kind_ == Kind::kAlways; }
  bool is_absent() const { return kind_ == Kind::kAbsent; }
  const std::string& tag() const { return tag_; }  // "": another condition

 private:
  enum class Kind : uint8_t { kAlways, kAbsent, kTag };
  Condition(Kind kind, std::string tag) : kind_(kind), tag_(std::move(tag)) {}

  Kind kind_ = Kind::kAlways;
  std::string tag_;
};

}  // namespace tilestone
