#include "tilestone/engine/save/kept_step_internal.h"

#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/open/sealed_internal.h"
#include "tilestone/format/manifest.h"

namespace tilestone::engine {
namespace {

constexpr uint8_t kVersion = 1;

Bytes bytes_in(ByteReader& in) {
  const ByteView found = in.blob();
  return {found.begin(), found.end()};
}

IndexRole role_in(ByteReader& in) {
  const uint8_t role = in.u8();
  if (role > static_cast<uint8_t>(IndexRole::kAfter)) in.fail("an unknown role of an index file");
  return static_cast<IndexRole>(role);
}

KeptStep step_in(ByteReader& in) {
  KeptStep step;
  step.step = in.varint();
  step.save_id = in.string();
  step.drains = in.u8() != 0;
  step.replaces = in.u8() != 0;
  for (uint64_t left = in.count(2); left > 0; --left) {
    std::string name(in.string());
    step.attributes.emplace(std::move(name), in.string());
  }
  for (uint64_t left = in.count(2); left > 0; --left) {
    std::string name(in.string());
    step.files.push_back({std::move(name), in.varint()});
  }
  for (uint64_t left = in.count(4); left > 0; --left) {
    std::string name(in.string());
    const IndexRole role = role_in(in);
    const bool of_dialect = in.u8() != 0;
    step.index.push_back({std::move(name), role, of_dialect, in.varint()});
  }
  step.manifest_size = in.varint();
  return step;
}

}  // namespace

Bytes KeptStep::encode() const {
  ByteWriter out;
  out.u8(kVersion);
  out.varint(step);
  out.string(save_id);
  out.u8(drains);
  out.u8(replaces);
  out.varint(attributes.size());
  for (const auto& [name, value] : attributes) {
    out.string(name);
    out.string(value);
  }
  out.varint(files.size());
  for (const ReceiptFile& file : files) {
    out.string(file.name);
    out.varint(file.size);
  }
  out.varint(index.size());
  for (const IndexEntry& entry : index) {
    out.string(entry.name);
    out.u8(static_cast<uint8_t>(entry.role));
    out.u8(entry.of_dialect);
    out.varint(entry.size);
  }
  out.varint(manifest_size);
  return sealed(std::move(out));
}

KeptStep KeptStep::decode(ByteView bytes, const std::string& file) {
  return unsealed(bytes, file, kVersion, step_in);
}

Bytes KeptIndex::encode() const {
  ByteWriter out;
  out.blob(about.encode());
  out.varint(files.size());
  for (const Bytes& file : files) out.blob(file);
  out.blob(manifest);
  return std::move(out).take();
}

KeptIndex KeptIndex::decode(ByteView bytes) {
  ByteReader in(bytes, "the index of a step");
  KeptIndex index;
  index.about = KeptStep::decode(bytes_in(in), "the index of a step");
  for (uint64_t left = in.count(1); left > 0; --left) index.files.push_back(bytes_in(in));
  index.manifest = bytes_in(in);
  if (index.files.size() != index.about.index.size()) in.fail("files of the index are missing");
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
