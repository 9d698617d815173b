// Rules that rename keys (engine/convert/convert.h).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tilestone/engine/convert/convert.h"

namespace tilestone::engine {

class RenameRules {
 public:
  explicit RenameRules(const std::vector<RenameRule>& rules);  // Error(kInvalidArgument)
  ~RenameRules();
  RenameRules(const RenameRules&) = delete;
  RenameRules& operator=(const RenameRules&) = delete;

  // The new key; "": it is left out. Error(kInvalidArgument) for a key that is too long.
  std::string apply(const std::string& key) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tilestone::engine
