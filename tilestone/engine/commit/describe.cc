#include "tilestone/engine/commit/describe_internal.h"

#include <utility>

#include "tilestone/format/manifest.h"

namespace tilestone::engine {

Descriptions describe_save(DescribedSave save, const Format& format, const Dialect& dialect) {
  Metadata metadata = merge_reports(std::move(save.reports), save.copies);
  metadata.save_id = save.save_id;
  metadata.writer = save.writer;
  metadata.dialect = dialect.read_as();
  Descriptions made;
  made.index = merge_index(format.encode_index(metadata), std::move(save.of_dialect));
  made.files.insert(metadata.files.begin(), metadata.files.end());

  Manifest manifest;
  manifest.save_id = save.save_id;
  manifest.world_size = static_cast<int>(save.encoded.size());
  manifest.format = format.name();
  manifest.dialect = dialect.read_as();
  manifest.writer = save.writer;
  manifest.index = sums_of(made.index);
  manifest.attributes = std::move(save.attributes);
  made.manifest = manifest.encode(save.encoded);
  return made;
}

}  // namespace tilestone::engine
