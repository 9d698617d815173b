#include "tilestone/engine/save/kept_step_internal.h"

#include <utility>

#include "tilestone/base/both_ways.h"
#include "tilestone/engine/open/sealed_internal.h"
#include "tilestone/format/manifest.h"

namespace tilestone::engine {
namespace {

constexpr uint8_t kVersion = 1;

// As in base/both_ways.h.
void walk_step(auto& io, auto& step) {
  both::varint(io, step.step);
  both::text(io, step.save_id);
  both::u8(io, step.drains);
  both::u8(io, step.replaces);
  both::text_map(io, step.attributes);
  both::each(io, step.files, 2, [&](auto& file) {
    both::text(io, file.name);
    both::varint(io, file.size);
  });
  both::each(io, step.index, 4, [&](auto& entry) {
    both::text(io, entry.name);
    both::one_of(io, entry.role, IndexRole::kAfter, "an unknown role of an index file");
    both::u8(io, entry.of_dialect);
    both::varint(io, entry.size);
  });
  both::varint(io, step.manifest_size);
}

void walk_files(auto& io, auto& index) {
  both::each(io, index.files, 1, [&](auto& file) { both::blob(io, file); });
  both::blob(io, index.manifest);
  both::expect(io, index.files.size() == index.about.index.size(),
               "files of the index are missing");
}

}  // namespace

Bytes KeptStep::encode() const {
  ByteWriter out;
  out.u8(kVersion);
  walk_step(out, *this);
  return sealed(std::move(out));
}

KeptStep KeptStep::decode(ByteView bytes, const std::string& file) {
  return unsealed(bytes, file, kVersion, [](ByteReader& in) {
    KeptStep step;
    walk_step(in, step);
    return step;
  });
}

Bytes KeptIndex::encode() const {
  ByteWriter out;
  out.blob(about.encode());
  walk_files(out, *this);
  return std::move(out).take();
}

KeptIndex KeptIndex::decode(ByteView bytes) {
  ByteReader in(bytes, "the index of a step");
  KeptIndex index;
  index.about = KeptStep::decode(in.blob(), "the index of a step");
  walk_files(in, index);
  return index;
}

NewIndex KeptIndex::made() const {
  NewIndex made;
  for (size_t i = 0; i < files.size(); ++i) {
    made.index.push_back({about.index[i].name, files[i], about.index[i].role});
  }
  made.manifest = manifest;
  for (const ReceiptFile& file : about.files) made.files.insert(file.name);
  return made;
}

}  // namespace tilestone::engine
