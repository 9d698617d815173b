#include "tilestone/engine/convert/convert_source_internal.h"

#include <string>

#include "tilestone/base/error.h"
#include "tilestone/engine/convert/convert_optimizer_internal.h"
#include "tilestone/engine/convert/stored_source_internal.h"
#include "tilestone/format/archive/archive_reader_internal.h"
#include "tilestone/format/dialect/dialect.h"
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
  try {
    if (const auto fault = archive::check_archive(file.bytes())) {
      throw Error(ErrorCode::kCorrupt,
                  fault->problem + " (at byte " + std::to_string(fault->offset) + ")");
    }
  } catch (Error& error) {
    error.with_file(path);
    throw;
  }
}

}  // namespace

ConvertSource open_source(const Location& location, const ConvertOptions& options) {
  const auto stored = StoredSource::open(location, opening_of(options));
  const Metadata& metadata = stored->metadata();
  ConvertSource source;
  source.format = stored->opened().format->name();
  source.dialect = stored->opened().dialect->name();
  if (source.format == torch_save_format()->name()) {
    const std::string path = location.describe();
    if (converts_optimizer(options)) {
      throw Error(ErrorCode::kInvalidArgument,
                  "a file of torch.save does not hold the buckets of a distributed optimizer")
          .with_file(path);
    }
    check_archive_file(path);
  }
  for (const StoredTensor& tensor : metadata.tensors) {
    source.entries.push_back(
        {.key = tensor.key,
         .path = tensor.path,
         .dtype = tensor.dtype,
         .shape = tensor.shape,
         .tensor = [=, &tensor](DType dtype) { return stored->tensor(tensor, dtype); },
         .object = nullptr,
         .order = tensor.order});
  }
  for (const StoredObject& object : metadata.objects) {
    source.entries.push_back({.key = object.key,
                              .path = object.path,
                              .dtype = {},
                              .shape = {},
                              .tensor = nullptr,
                              .object = [=, &object] { return stored->object(object); },
                              .stored = &object,
                              .order = object.order});
  }
  source.common = stored->common();
  source.dict_keys = metadata.dict_keys;
  source.tensor_attributes = metadata.attributes;
  if (const auto& manifest = stored->opened().manifest) source.attributes = manifest->attributes;
  if (converts_optimizer(options)) make_fully_reshardable(source, stored, options.layout_file);
  return source;
}

}  // namespace tilestone::engine
