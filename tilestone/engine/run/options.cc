#include <fmt/format.h>

#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/base/printable.h"
#include "tilestone/engine/run/inventory.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/torch_dist/torch_dist.h"
#include "tilestone/plan/receipt.h"

namespace tilestone::engine {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, what);
}

// False for NaN.
bool is_timeout(double timeout) { return timeout > 0; }

void check_timeout(double timeout) {
  if (is_timeout(timeout)) return;
  refuse(fmt::format("timeout is {}; expected seconds, more than 0", timeout));
}

void check_resources(const Resources& resources) {
  const auto check = [](const char* name, auto value, auto low, auto high, const char* or_else) {
    if (value >= low && value <= high) return;
    refuse(fmt::format("resources.{} is {}; expected {} to {}{}", name, value, low, high, or_else));
  };
  const int threads = resources.threads == 0 ? 1 : resources.threads;
  check("threads", threads, 1, kMaxThreads, ", or 0 for as many as the machine has (at most 8)");
  check("buffer_bytes", resources.buffer_bytes, kMinBufferBytes, kMaxBufferBytes, "");
  check("files_per_rank", resources.files_per_rank, 1, kMaxFilesPerRank, "");
}

void check_attributes(const SaveOptions& options) {
  uint64_t bytes = 0;
  for (const auto& [name, value] : options.attributes) bytes += name.size() + value.size();
  if (bytes <= kMaxAttributeBytes) return;
  refuse(fmt::format("attributes have {} bytes; expected at most {}", bytes, kMaxAttributeBytes));
}

void check_separation(const SaveOptions& options) {
  constexpr size_t kLongestHint = 128;
  const std::string& hint = options.separation_hint;
  if (hint.empty()) return;
  if (hint.size() > kLongestHint || hint.front() == '.' || hint.find('/') != std::string::npos ||
      printable(hint) != hint) {
    refuse(fmt::format(
        "separation_hint is \"{}\"; expected at most {} bytes that can begin a file's name: "
        "printable, without '/', not beginning with '.'",
        printable(hint), kLongestHint));
  }
  if (!options.by_files && format_of(options)->name() == torch_dist_format()->name()) return;
  throw Error(ErrorCode::kUnsupported,
              "separation_hint needs the format torch_dist and a communicator")
      .with_hint("save without separation_hint");
}

void check_tensor_attributes(const SaveOptions& options) {
  uint64_t bytes = 0;
  for (const auto& [key, attributes] : options.tensor_attributes) {
    bytes += with_key(key, [&] { return attribute_bytes(attributes); });
  }
  if (bytes <= kMaxTensorAttributeBytes) return;
  refuse(fmt::format("tensor_attributes have {} bytes; expected at most {}", bytes,
                     kMaxTensorAttributeBytes));
}

void check_reuse(const SaveOptions& options) {
  if (!options.reuse || !options.by_files || !options.by_files->torch_rank_local) return;
  throw Error(ErrorCode::kUnsupported, "torch's rank-local mode does not support reuse")
      .with_hint("save without reuse, or without torch_rank_local");
}

}  // namespace

void check_by_files(const SaveOptions& options) {
  constexpr size_t kShortestToken = 8, kLongestToken = 256;
  const ByFiles& files = *options.by_files;
  if (files.world_size < 1 || files.rank < 0 || files.rank >= files.world_size) {
    refuse(fmt::format(
        "by_files.rank is {}, by_files.world_size is {}; expected 0 <= rank < world_size",
        files.rank, files.world_size));
  }
  if (files.world_size > kMaxWorldSize) {
    refuse(fmt::format("by_files.world_size is {}; expected at most {}", files.world_size,
                       kMaxWorldSize));
  }
  if (files.token.size() < kShortestToken || files.token.size() > kLongestToken) {
    refuse(fmt::format(
        "by_files.token has {} bytes; expected {} to {}: the same text on all ranks of one run, "
        "and a new text for every start of the job",
        files.token.size(), kShortestToken, kLongestToken));
  }
  if (options.comm.size() > 1) refuse("a save by files takes no communicator");
  if (options.overwrite) {
    refuse("a save by files cannot replace a checkpoint; overwrite must be false");
  }
}

void check_options(const SaveOptions& options) {
  if (options.step != nullptr && options.step->refused) throw *options.step->refused;
  if (options.step != nullptr && !options.step->exists_as.empty() && !options.overwrite) {
    throw Error(ErrorCode::kAlreadyExists, fmt::format("{} is durable already, in the folder {}",
                                                       options.step->name, options.step->exists_as))
        .with_hint("overwrite saves it again, in a folder of the manager's own name");
  }
  if (options.by_files) check_by_files(options);
  check_attributes(options);
  check_separation(options);
  check_reuse(options);
  check_tensor_attributes(options);
  check_timeout(options.timeout);
  check_resources(options.resources);
}

void check_options(const LoadOptions& options) {
  if (options.own_rank && (*options.own_rank < 0 || options.comm.size() > 1)) {
    refuse(
        fmt::format("own_rank is {} in a group of {} ranks; expected 0 or more, and no "
                    "communicator",
                    *options.own_rank, options.comm.size()));
  }
  check_timeout(options.timeout);
  check_resources(options.resources);
}

void check_options(const OpenOptions& options) { check_resources(options.resources); }

std::shared_ptr<const Format> format_of(const SaveOptions& options) {
  return options.format != nullptr ? options.format : torch_dist_format();
}

std::shared_ptr<const Dialect> dialect_of(const SaveOptions& options) {
  return options.dialect != nullptr ? options.dialect : pytorch_dialect();
}

Deadline deadline_of(double timeout) {
  return Deadline::after(
      std::chrono::duration<double>(is_timeout(timeout) ? timeout : kDefaultTimeout));
}

Deadline deadline_of(const SaveOptions& options) {
  return deadline_of(options.timeout).with_interrupt(options.interrupt);
}

Deadline deadline_of(const LoadOptions& options) {
  return deadline_of(options.timeout).with_interrupt(options.interrupt);
}

Location followed(const Location& location, const Reading& reading) {
  return reading.follow_links ? location.following_links() : location;
}

}  // namespace tilestone::engine
