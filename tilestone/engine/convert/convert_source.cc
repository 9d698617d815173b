#include "tilestone/engine/convert/convert_source_internal.h"

#include <string>

#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/engine/convert/convert_optimizer_internal.h"
#include "tilestone/format/archive/archive_reader_internal.h"
#include "tilestone/format/torch_save/torch_save.h"
#include "tilestone/storage/mapped_file.h"

namespace tilestone::engine {
namespace {

// A layout is given for nothing else.
bool converts_optimizer(const ConvertOptions& options) {
  if (!options.optimizer.empty() && options.optimizer != "fully_reshardable") {
    throw Error(ErrorCode::kInvalidArgument,
                "an optimizer's state can't be converted to \"" + options.optimizer + "\"")
        .with_hint("the only format is fully_reshardable");
  }
  return !options.optimizer.empty() || !options.layout_file.empty();
}

// Reads all of a file of torch.save once. Reading its tensors checks only those that are a whole
// record of it.
void check_archive_file(const std::string& path) {
  const MappedFile file(path);
  with_file(path, [&] {
    if (const auto fault = archive::check_archive(file.bytes())) {
      throw Error(ErrorCode::kCorrupt,
                  fault->problem + " (at byte " + std::to_string(fault->offset) + ")");
    }
  });
}

}  // namespace

void expect_apart(const Location& source, const Location& target) {
  const auto path_of = [](const Location& location) {
    const std::string path = location.resolved_identity();
    return path.ends_with('/') ? path : path + "/";
  };
  const std::string from = path_of(source), to = path_of(target);
  if (from == to) {
    throw Error(ErrorCode::kAlreadyExists, "the new checkpoint is the one that is converted")
        .with_file(target.describe());
  }
  const bool is_inside = to.starts_with(from);
  if (!is_inside && !from.starts_with(to)) return;
  throw Error(ErrorCode::kInvalidArgument,
              is_inside ? "the new checkpoint would be inside the one that is converted"
                        : "the checkpoint that is converted is inside the target")
      .with_file(target.describe())
      .with_hint("name a target beside it");
}

ConvertSource open_source(const Location& location, const ConvertOptions& options) {
  ConvertSource source;
  source.stored = StoredSource::open(location, opening_of(options));
  for (const std::string& note : source.metadata().notes) {
    log(LogLevel::kWarning, "convert: " + location.describe() + ": " + note);
  }
  if (source.format() == torch_save_format()->name()) {
    const std::string path = location.describe();
    if (converts_optimizer(options)) {
      throw Error(ErrorCode::kInvalidArgument,
                  "a file of torch.save does not hold the buckets of a distributed optimizer")
          .with_file(path);
    }
    check_archive_file(path);
  }
  for (const StoredTensor& tensor : source.metadata().tensors) source.entries.push_back({&tensor});
  for (const StoredObject& object : source.metadata().objects) {
    source.entries.push_back({nullptr, &object});
  }
  source.common = source.stored->common();
  if (converts_optimizer(options)) make_fully_reshardable(source, options.layout_file);
  return source;
}

}  // namespace tilestone::engine
