// Checks of the options' values.
#pragma once

#include <memory>
#include <string>

#include "tilestone/base/deadline.h"
#include "tilestone/engine/run/options.h"

namespace tilestone::engine {

// Limit for a save without a communicator. A larger number is a mistake, and the search for missing
// ranks would take too long.
inline constexpr int kMaxWorldSize = 1 << 20;

// Error(kInvalidArgument) that names the option, its value and what is expected.
void check_options(const SaveOptions& options);
void check_options(const LoadOptions& options);
void check_options(const OpenOptions& options);

// Checks only the part that says who takes part in a save by files. options.by_files must be set.
void check_by_files(const SaveOptions& options);

// The format and the dialect of a save: those that the options name, or the default ones.
std::shared_ptr<const Format> format_of(const SaveOptions& options);
std::shared_ptr<const Dialect> dialect_of(const SaveOptions& options);

// When a call with this timeout (seconds) ends. An invalid timeout gives the default: the call
// still needs time for its first round, in which check_options rejects the option for all ranks.
Deadline deadline_of(double timeout);
// The same with the options' interrupt.
Deadline deadline_of(const SaveOptions& options);
Deadline deadline_of(const LoadOptions& options);

// Whether a path is a URL: its first component ends with a colon after two or more characters, as
// "gs:" in "gs://bucket/x", and "s3:" in "s3:/bucket/x", which pathlib makes of "s3://bucket/x".
bool is_url(const std::string& path);
// Error(kUnsupported) if the path is a URL of a store that this build does not know, and what
// check_store_url() throws. Does not reach for the network.
void refuse_url(const std::string& path);

// The location as a load or an open checkpoint reads it (Reading::follow_links).
Location followed(const Location& location, const Reading& reading);

}  // namespace tilestone::engine
