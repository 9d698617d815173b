#include <utility>
#include <vector>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/cleanup_internal.h"
#include "tilestone/engine/opening_internal.h"
#include "tilestone/format/torch_dist/torch_dist.h"

namespace tilestone::engine {
namespace {

constexpr uint64_t kAnySize = UINT64_MAX;  // memory follows the size of a file that is there
constexpr int kMostOverwrites = 8;         // while one description is read

std::vector<std::shared_ptr<const Format>> known_formats() { return {torch_dist_format()}; }

std::shared_ptr<const Format> format_named(std::string_view name,
                                           const std::shared_ptr<const Format>& wanted) {
  if (wanted != nullptr) return wanted;
  for (auto& format : known_formats()) {
    if (format->name() == name) return format;
  }
  throw Error(ErrorCode::kUnsupported, "unknown format \"" + std::string(name) + "\"");
}

// The rank-local metadata files that stand beside the format's own metadata.
std::vector<std::string> rank_local_files(Storage& storage, const Format& format) {
  FileImage others;
  for (std::string& name : storage.list()) {
    if (name != format.metadata_name()) others.emplace(std::move(name), Bytes());
  }
  const auto without = memory_storage(std::move(others));
  if (!format.detect(*without)) return {};
  return format.metadata_files(*without);
}

// The note, if it speaks of the save that wrote `metadata` and of every rank-local file there.
std::optional<Replaced> check_note(Storage& storage, const Format& format, const Bytes& metadata) {
  Replaced replaced = Replaced::decode(read_file(storage, std::string(kReplacedName), kAnySize));
  const auto alone = memory_storage({{format.metadata_name(), metadata}});
  if (format.read_metadata(*alone).save_id != replaced.save_id) return std::nullopt;
  for (const std::string& name : rank_local_files(storage, format)) {
    const auto found = replaced.files.find(name);
    if (found == replaced.files.end()) return std::nullopt;
    if (xxh3_64(read_file(storage, name, kAnySize)) != found->second) return std::nullopt;
  }
  return replaced;
}

FileImage read_metadata_files(Storage& storage, const Format& format) {
  FileImage files;
  if (find_replaced(storage, format)) {
    const std::string name = format.metadata_name();
    files.emplace(name, read_file(storage, name, kAnySize));
    return files;
  }
  for (std::string& each : format.metadata_files(storage)) {
    Bytes bytes = read_file(storage, each, kAnySize);
    files.emplace(std::move(each), std::move(bytes));
  }
  return files;
}

bool is_file_name(const std::string& name) {
  try {
    check_file_name(name);
    return true;
  } catch (const Error&) {
    return false;
  }
}

// The metadata as it stands, and its manifest where there is one.
Description read_once(Storage& storage, const Format& format) {
  Description description{std::string(format.name()), read_metadata_files(storage, format), {}};
  description.metadata = format.read_metadata(*memory_storage(description.files));
  const std::string name = manifest_name(description.metadata->save_id);
  // A save id that can't be part of a file's name is another writer's.
  if (description.metadata->save_id.empty() || !is_file_name(name)) return description;
  try {
    description.files.emplace(name, read_file(storage, name, kAnySize));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kNotFound) throw;
  }
  return description;
}

bool lacks_manifest(const Description& description, const Format& format) {
  const Metadata& metadata = *description.metadata;
  return !metadata.files.empty() && is_own_name(format, metadata.files.front()) &&
         !description.files.contains(manifest_name(metadata.save_id));
}

void check_metadata_bytes(const Manifest& manifest, const std::string& name, const Bytes& bytes) {
  if (manifest.metadata_size == bytes.size() && manifest.metadata_xxh3 == xxh3_64(bytes)) return;
  throw Error(ErrorCode::kCorrupt, "the metadata is not what its save wrote: expected " +
                                       std::to_string(manifest.metadata_size) + " bytes of XXH3 " +
                                       std::to_string(manifest.metadata_xxh3) + ", found " +
                                       std::to_string(bytes.size()) + " bytes of XXH3 " +
                                       std::to_string(xxh3_64(bytes)))
      .with_file(name);
}

}  // namespace

std::shared_ptr<const Format> find_format(Storage& storage,
                                          const std::shared_ptr<const Format>& wanted) {
  if (wanted != nullptr) return wanted;
  for (auto& format : known_formats()) {
    if (format->detect(storage)) return format;
  }
  Error error(ErrorCode::kNotFound, "no checkpoint at " + storage.describe());
  const auto own = storage.list(std::string(kOwnDirectory) + "/");
  if (const auto lost = find_lost(storage, *torch_dist_format(), own)) {
    error.with_hint(lost->what + "; " + lost->hint);
  }
  throw std::move(error);
}

bool any_checkpoint(Storage& storage, const Format& also) {
  if (also.detect(storage)) return true;
  for (const auto& format : known_formats()) {
    if (format->detect(storage)) return true;
  }
  return false;
}

std::optional<Replaced> find_replaced(Storage& storage, const Format& format) {
  const std::string name = format.metadata_name();
  if (!storage.stat(std::string(kReplacedName)) || !storage.stat(name)) return std::nullopt;
  return check_note(storage, format, read_file(storage, name, kAnySize));
}

// A save that has replaced a checkpoint removes its manifest: metadata without one may be of the
// past already, so it is read again until it stays the same.
Description read_description(Storage& storage, const Format& format) {
  Description found = read_once(storage, format);
  for (int i = 0; i < kMostOverwrites && lacks_manifest(found, format); ++i) {
    Description next = read_once(storage, format);
    const bool same = next.files == found.files;
    found = std::move(next);
    if (same) break;
  }
  return found;
}

Opened open_description(Description description, const std::shared_ptr<const Format>& wanted) {
  Opened opened;
  opened.format = format_named(description.format, wanted);
  if (!description.metadata) {
    description.metadata = opened.format->read_metadata(*memory_storage(description.files));
  }
  opened.metadata = std::move(*description.metadata);
  auto manifest = description.files.extract(manifest_name(opened.metadata.save_id));
  if (opened.metadata.save_id.empty() || manifest.empty()) return opened;
  const auto alone = memory_storage({{manifest.key(), std::move(manifest.mapped())}});
  opened.manifest = read_manifest(*alone, opened.metadata.save_id);
  if (!opened.manifest) return opened;
  const std::string name = opened.format->metadata_name();
  const auto metadata = description.files.find(name);
  if (metadata == description.files.end()) {
    throw Error(ErrorCode::kCorrupt, "there is a manifest of a save without its metadata file")
        .with_file(name);
  }
  check_metadata_bytes(*opened.manifest, name, metadata->second);
  attach_checksums(opened.metadata, *opened.manifest);
  return opened;
}

Standing read_standing(Storage& storage, const std::shared_ptr<const Format>& wanted) {
  Standing standing;
  if (!any_checkpoint(storage, *wanted)) return standing;
  const auto format = find_format(storage, wanted->detect(storage) ? wanted : nullptr);
  const Description description = read_description(storage, *format);
  std::set<std::string> described;
  for (const auto& [name, bytes] : description.files) described.insert(name);
  const Metadata& metadata = *description.metadata;
  standing.found = true;
  standing.save_id = metadata.save_id;
  if (metadata.rank_local) standing.rank_local = described;
  standing.files.insert(metadata.files.begin(), metadata.files.end());
  for (const std::string& name : described) {
    if (name.starts_with(std::string(kOwnDirectory) + "/")) standing.files.insert(name);
  }
  return standing;
}

Bytes Description::encode() const {
  ByteWriter writer;
  writer.string(format);
  writer.varint(files.size());
  for (const auto& [name, bytes] : files) {
    writer.string(name);
    writer.blob(bytes);
  }
  return std::move(writer).take();
}

Description Description::decode(ByteView bytes) {
  ByteReader reader(bytes, "description of a checkpoint");
  Description description;
  description.format = reader.string();
  for (uint64_t count = reader.count(2); count > 0; --count) {
    std::string name(reader.string());
    const ByteView content = reader.blob();
    description.files.emplace(std::move(name), Bytes(content.begin(), content.end()));
  }
  reader.expect_end();
  return description;
}

Bytes Replaced::encode() const {
  ByteWriter writer;
  writer.string(save_id);
  writer.varint(files.size());
  for (const auto& [name, hash] : files) {
    writer.string(name);
    writer.u64(hash);
  }
  return std::move(writer).take();
}

Replaced Replaced::decode(ByteView bytes) {
  ByteReader reader(bytes, std::string(kReplacedName));
  Replaced replaced;
  replaced.save_id = reader.string();
  for (uint64_t count = reader.count(9); count > 0; --count) {
    std::string name(reader.string());
    replaced.files.emplace(std::move(name), reader.u64());
  }
  reader.expect_end();
  return replaced;
}

}  // namespace tilestone::engine
