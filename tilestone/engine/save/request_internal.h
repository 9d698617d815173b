// One rank's request to save.
#pragma once

#include <optional>
#include <variant>

#include "tilestone/base/error.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/state/state_dict.h"

namespace tilestone::engine {

struct SaveRequest {
  StateDict state;
  Location location;
  SaveOptions options;  // its comm is ignored
  // If given, the common state of this state dict is compared with the other ranks'
  // (Checks::common_differs) instead of the one in `state`. The common state of `state` is saved.
  std::optional<StateDict> compared_common = std::nullopt;
  double preparing = 0;  // seconds in which the caller made the request
};

// A request that the caller owns. A driver uses it only while it plans.
struct RequestView {
  const StateDict* state = nullptr;
  const Location* location = nullptr;
  const SaveOptions* options = nullptr;
  const StateDict* compared = nullptr;  // SaveRequest::compared_common; null: not given
  double preparing = 0;                 // SaveRequest::preparing
  // The only rank writes all files: of a conversion. Then zarr can be written to an object store.
  bool one_writer = false;
};

inline RequestView view_of(const SaveRequest& request) {
  return {&request.state, &request.location, &request.options,
          request.compared_common ? &*request.compared_common : nullptr, request.preparing};
}

// A rank that can't make its request takes part in the save all the same: its error is its first
// message, by which the other ranks learn of it.
using MadeRequest = std::variant<RequestView, Error>;

// SaveRequest::preparing; 0 if there is no request.
inline double preparing_of(const MadeRequest& request) {
  const auto* const made = std::get_if<RequestView>(&request);
  return made != nullptr ? made->preparing : 0;
}

// Throws the error with which making the request has failed.
inline const RequestView& expect_made(const MadeRequest& request) {
  if (const Error* const failed = std::get_if<Error>(&request)) throw *failed;
  return std::get<RequestView>(request);
}

}  // namespace tilestone::engine
