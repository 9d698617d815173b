#include "tilestone/engine/open/description_internal.h"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "tilestone/base/both_ways.h"
#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/open/attempt_files_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/detect_internal.h"
#include "tilestone/engine/open/rank_local_internal.h"
#include "tilestone/format/manifest.h"
#include "tilestone/storage/one_file.h"

namespace tilestone::engine {
namespace {

constexpr int kMaxLost = 3;       // times that a file is lost while a checkpoint is described
constexpr int kMaxExchanges = 8;  // exchanges of the directory tolerated while it is described

// The content of kReplacedName, if it is about the save of the existing index and lists every
// rank-local file.
std::optional<Replaced> check_note(Storage& storage, const Format& format,
                                   std::span<const std::string> names) {
  Replaced replaced = Replaced::decode(read_file(storage, std::string(kReplacedName), kAnySize));
  const std::vector<std::string> rank_local = format.rank_local_files(names);
  const std::vector<std::string> others = without({names.begin(), names.end()}, rank_local);
  if (!format.detect(others)) return std::nullopt;
  const DirectoryFiles files = read_index(storage, format, nullptr, others);
  if (format.parse_index(files).save_id != replaced.save_id) return std::nullopt;
  for (const std::string& name : rank_local) {
    const auto found = replaced.files.find(name);
    if (found == replaced.files.end()) return std::nullopt;
    if (xxh3_64(read_file(storage, name, kAnySize)) != found->second) return std::nullopt;
  }
  return replaced;
}

// The name of the manifest that may belong to the index: that of the save that the index names. If
// the index names no save, the only manifest that exists.
std::optional<std::string> manifest_of(const Metadata& metadata,
                                       std::span<const std::string> names) {
  if (may_have_manifest(metadata.save_id)) return manifest_name(metadata.save_id);
  std::optional<std::string> only;
  if (!metadata.save_id.empty()) return only;
  for (const std::string& name : names) {
    if (kind_of(name) != kManifestKind) continue;
    if (only) return std::nullopt;
    only = name;
  }
  return only;
}

// An index that can't be parsed may look like one of another writer. If a manifest lists a file of
// it with the same size and another checksum, the file is damaged: Error(kCorrupt), which also says
// what parsing found (`error`).
void expect_unchanged(Storage& storage, const DirectoryFiles& files,
                      std::span<const std::string> names, const Error& error) {
  for (const std::string& name : names) {
    if (kind_of(name) != kManifestKind) continue;
    std::vector<IndexSum> sums;
    try {
      sums = Manifest::decode(read_file(storage, name, kAnySize), name).index;
    } catch (const Error&) {
      continue;  // the error of the index says more
    }
    for (const IndexSum& sum : sums) {
      const auto found = files.contents.find(sum.name);
      if (found == files.contents.end() || found->second.size() != sum.size) continue;
      if (xxh3_64(found->second) == sum.xxh3) continue;
      throw Error(ErrorCode::kCorrupt,
                  "the file has changed since it was saved: " + error.message())
          .with_file(sum.name);
    }
  }
}

// A checkpoint that is one file must not be one of several that hold pieces of tensors, which it
// need not say itself. Throws what parsing all of them throws.
void expect_no_pieces_beside(const Storage& storage, const Format& format) {
  const auto entry = entry_of_one_file(storage);
  if (!entry || !format.may_hold_pieces(entry->name)) return;
  std::vector<std::string> all = entry->storage->list("");
  std::erase_if(all, [&](const std::string& name) { return !format.may_hold_pieces(name); });
  if (all.size() == 1) return;
  const Metadata joined = format.parse_index(read_index(*entry->storage, format, nullptr, all));
  for (const StoredTensor& tensor : joined.tensors) {
    const auto is_here = [&](const StoredChunk& chunk) {
      return joined.files[chunk.at.file] == entry->name;
    };
    if (tensor.chunks.size() == 1 ||
        std::none_of(tensor.chunks.begin(), tensor.chunks.end(), is_here)) {
      continue;
    }
    throw Error(ErrorCode::kUnsupported,
                "the file has a piece of this tensor; its other pieces are in the files beside it")
        .with_key(tensor.key)
        .with_file(entry->name)
        .with_hint("open the folder, which joins them");
  }
}

// Whether to read the receipts of a rank-local save's ranks.
enum class Receipts : uint8_t { kRead, kIgnored };

// Reads the manifest among these names, unless it has vanished meanwhile.
void read_manifest(Storage& storage, std::span<const std::string> names,
                   DescribingFiles& description) {
  const auto manifest = manifest_of(*description.metadata, names);
  if (!manifest) return;
  try {
    description.manifest = read_file(storage, *manifest, kAnySize);
    description.manifest_file = *manifest;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kNotFound) throw;
    return;
  }
  if (description.manifest.empty()) {
    throw Error(ErrorCode::kCorrupt, "the manifest is empty").with_file(*manifest);
  }
}

// Where a save has put the switch, and then puts files with fixed names one by one over those of
// the checkpoint that it replaces, it has left copies of them (commit/transaction.cc). False: the
// files may be of two checkpoints.
bool read_what_follows(Storage& storage, DescribingFiles& description) {
  if (description.manifest.empty()) return false;
  for (const IndexSum& sum : sums_in(description.manifest, description.manifest_file)) {
    const auto found = description.files.contents.find(sum.name);
    if (found == description.files.contents.end()) continue;
    Bytes& bytes = found->second;
    if (bytes.size() == sum.size && xxh3_64(bytes) == sum.xxh3) continue;
    if (sum.role != IndexRole::kAfter) return false;
    auto copy = read_if_there(storage, temporary_of(description.metadata->save_id, sum.name));
    bytes = copy ? *std::move(copy) : read_file(storage, sum.name, kAnySize);  // put meanwhile
    if (bytes.size() != sum.size || xxh3_64(bytes) != sum.xxh3) return false;
  }
  return true;
}

// The index may be of the checkpoint that a save has just replaced. What was read after it is then
// another's.
void expect_same_index(Storage& storage, const Format& format, const DescribingFiles& description) {
  for (const std::string& name : format.index_files(description.files.names)) {
    const auto found = description.files.contents.find(name);
    if (found == description.files.contents.end()) continue;
    if (read_if_there(storage, name) == found->second) continue;
    throw Error(ErrorCode::kNotFound,
                "the checkpoint at " + storage.describe() + " was replaced while it was read")
        .with_file(name);
  }
}

// Reads the index among these names, and its manifest if there is one.
DescribingFiles read_once(Storage& storage, const DetectedFormat& found,
                          std::vector<std::string> names, Receipts receipts) {
  if (find_replaced(storage, *found.format, names)) {
    const std::vector<std::string> rank_local = found.format->rank_local_files(names);
    names = without(std::move(names), rank_local);
  }
  const bool rank_local = is_rank_local(*found.format, names);
  if (rank_local) expect_all_ranks(storage, *found.format, names);
  DescribingFiles description;
  description.format = found.format->name();
  description.dialect = found.dialect->name();
  description.files = read_index(storage, *found.format, found.dialect.get(), names, found.read);
  try {
    description.metadata = found.format->parse_index(description.files);
    expect_no_pieces_beside(storage, *found.format);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsafe) {
      expect_unchanged(storage, description.files, names, error);
    }
    throw;
  }
  if (rank_local) {
    // Ignores a manifest of this save: it belongs to an ordinary index that is not published yet.
    const Metadata& metadata = *description.metadata;
    expect_own_files(storage, *found.format, names, metadata);
    expect_no_other_ranks(*found.format, names, metadata);
    if (receipts == Receipts::kRead) {
      description.manifest =
          manifest_of_receipts(storage, *found.format, *found.dialect, metadata.save_id);
    }
    return description;
  }
  read_manifest(storage, names, description);
  if (found.dialect->has_fixed_names() && !read_what_follows(storage, description) &&
      !storage.facts().has_folders) {
    expect_same_index(storage, *found.format, description);
  }
  return description;
}

bool lacks_manifest(const DescribingFiles& description) {
  const Metadata& metadata = *description.metadata;
  return !metadata.rank_local && !metadata.files.empty() && is_own_name(metadata.files.front()) &&
         description.manifest.empty();
}

bool same_files(const DescribingFiles& a, const DescribingFiles& b) {
  return a.files.contents == b.files.contents && a.files.sizes == b.files.sizes &&
         a.files.parts == b.files.parts && a.manifest == b.manifest;
}

// A save that has replaced a checkpoint removes the old manifest. So an index without a manifest
// may be outdated, and is read again until two reads are equal.
DescribingFiles read_description(Storage& storage, const DetectedFormat& detected,
                                 std::vector<std::string> names, Receipts receipts) {
  DescribingFiles found = read_once(storage, detected, std::move(names), receipts);
  const DetectedFormat unread{detected.format, detected.dialect};
  for (int i = 0; i < kMaxOverwrites && lacks_manifest(found); ++i) {
    DescribingFiles next = read_once(storage, unread, names_of_checkpoint(storage), receipts);
    const bool same = same_files(next, found);
    found = std::move(next);
    if (same) break;
  }
  return found;
}

// Describes the part of a rank-local checkpoint that one rank has written, whether or not the other
// ranks have written theirs. nullopt if this rank has no metadata, or the checkpoint is not
// rank-local.
std::optional<DescribingFiles> describe_rank_alone(Storage& storage, const DetectedFormat& found,
                                                   std::span<const std::string> names, int rank) {
  const Format& format = *found.format;
  const std::string name = format.rank_index_name(rank);
  if (name.empty() || !is_rank_local(format, names) || !contains_name(names, name)) {
    return std::nullopt;
  }
  DescribingFiles description;
  description.format = format.name();
  description.dialect = found.dialect->name();
  description.files.names.push_back(name);
  description.files.contents.emplace(name, read_file(storage, name, kAnySize));
  description.metadata = format.parse_rank_index(description.files, rank);
  expect_own_files(storage, format, names, *description.metadata);
  description.manifest =
      manifest_of_receipts(storage, format, *found.dialect, description.metadata->save_id, rank);
  return description;
}

// Whether no file of the checkpoint says that its dialect is another one than `unmarked`.
bool may_be_of(const DescribingFiles& description, const Dialect& unmarked) {
  if (description.dialect != pytorch_dialect()->name()) return false;
  if (description.manifest.empty()) return true;
  return Manifest::decode(description.manifest, description.manifest_file).dialect ==
         unmarked.name();
}

}  // namespace

std::vector<IndexSum> sums_in(ByteView manifest, const std::string& file) {
  try {
    const uint64_t head = std::min<uint64_t>(manifest.size(), manifest_head_bytes(manifest, file));
    return decode_manifest_head(manifest.first(head), file).index;
  } catch (const Error& error) {
    log(LogLevel::kDebug, std::string("a manifest can't be read: ") + error.what());
    return {};
  }
}

std::optional<Replaced> find_replaced(Storage& storage, const Format& format,
                                      std::span<const std::string> names) {
  const std::string note(kReplacedName);
  if (format.rank_local_files(names).empty() && !contains_name(names, note)) return std::nullopt;
  if (!storage.stat(note)) return std::nullopt;
  return check_note(storage, format, names);
}

std::shared_ptr<Storage> hold(const std::shared_ptr<Storage>& storage) {
  try {
    return storage->held();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kNotFound) throw;
    return storage;
  }
}

namespace {

// Whether the checkpoint that was found there has been removed since.
bool is_gone(Storage& storage, const DetectedFormat& found) {
  const std::vector<std::string> names = names_of_checkpoint(storage);
  return contains_name(names, kRemovedName) || (found.format && !found.format->detect(names));
}

// `found`: with its storage, where these names are. `own_rank`, `unmarked`: see find_checkpoint().
void describe(Found& found, const std::shared_ptr<const Format>& wanted,
              std::optional<int> own_rank, const std::shared_ptr<const Dialect>& unmarked,
              std::vector<std::string> names) {
  found.format = find_format(*found.storage, wanted, names);
  if (own_rank) {
    auto own = describe_rank_alone(*found.storage, found.format, names, *own_rank);
    found.of_own_rank = own.has_value();
    if (own) found.description = *std::move(own);
  }
  if (!found.of_own_rank) {
    found.description =
        read_description(*found.storage, found.format, std::move(names), Receipts::kRead);
  }
  if (unmarked != nullptr && may_be_of(found.description, *unmarked)) {
    found.format.dialect = unmarked;
    found.description.dialect = unmarked->name();
  }
}

}  // namespace

// If a save exchanges the directory after it was held, the held files are removed, one after the
// other. So what was found counts only if the directory still stands at the end, and otherwise the
// new directory is tried.
Found find_checkpoint(const std::shared_ptr<Storage>& storage,
                      const std::shared_ptr<const Format>& wanted, std::optional<int> own_rank,
                      const std::shared_ptr<const Dialect>& unmarked,
                      std::vector<std::string> at_once) {
  for (int i = 0;; ++i) {
    Found found{hold(storage), {}, {}, false};
    const bool last = i == kMaxExchanges;
    try {
      describe(found, wanted, own_rank, unmarked,
               names_of_checkpoint(*found.storage, std::exchange(at_once, {})));
      if (found.storage->stands()) return found;
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kCorrupt && is_gone(*found.storage, found.format)) {
        throw Error(ErrorCode::kNotFound, "no checkpoint at " + storage->describe())
            .with_reason(Reason::kNoCheckpoint)
            .with_hint(kRemovedHint);
      }
      // A save that replaces the checkpoint in place removes files, too. In an object store it
      // ends the reading of those that it replaces.
      const bool lost =
          error.code() == ErrorCode::kNotFound && error.reason() != Reason::kNoCheckpoint;
      const bool again = found.storage->stands() ? lost && i < kMaxLost : !last;
      if (!again) throw;
    }
    if (last) {
      throw Error(ErrorCode::kNotFound,
                  "the checkpoint at " + storage->describe() + " is replaced again and again")
          .with_hint("open it when no save replaces it");
    }
  }
}

namespace {

ExistingCheckpoint read_found(Storage& storage, const DetectedFormat& found,
                              std::vector<std::string> names) {
  ExistingCheckpoint existing;
  if (found.format == nullptr) return existing;
  const bool rank_local = is_rank_local(*found.format, names);
  DescribingFiles description;
  try {
    description = read_description(storage, found, std::move(names), Receipts::kIgnored);
  } catch (const Error& error) {
    if (!rank_local || error.code() != ErrorCode::kNotFound) throw;
    return existing;  // ranks are missing: the files belong to an incomplete save
  }
  const Metadata& metadata = *description.metadata;
  existing.found = true;
  existing.save_id = metadata.save_id;
  for (const auto& [name, bytes] : description.files.contents) {
    if (metadata.rank_local) existing.rank_local.insert(name);
    existing.index.insert(name);
  }
  existing.files.insert(metadata.files.begin(), metadata.files.end());
  if (description.manifest.empty()) return existing;
  existing.files.insert(description.manifest_file);
  // The index does not name the files that contain only copies.
  const Manifest manifest = Manifest::decode(description.manifest, description.manifest_file);
  for (const Receipt& receipt : manifest.receipts) {
    for (const ReceiptFile& file : receipt.files) existing.files.insert(file.name);
  }
  // A save of stock Megatron-Core over this checkpoint, if it failed, has removed metadata.json,
  // and without that file the checkpoint has no common.pt.
  for (const IndexSum& sum : manifest.index) existing.index.insert(sum.name);
  return existing;
}

}  // namespace

ExistingCheckpoint read_existing(Storage& storage, const std::shared_ptr<const Format>& wanted) {
  std::vector<std::string> names = names_of_checkpoint(storage);
  const DetectedFormat found = detect_as(storage, wanted, names);
  return read_found(storage, found, std::move(names));
}

ExistingCheckpoint read_existing(Storage& storage, const Standing& here) {
  return read_found(storage, here.found, here.of_checkpoint);
}

bool holds_checkpoint_of(Storage& storage, const std::shared_ptr<const Format>& format,
                         const std::string& save_id) {
  for (int tries = 0; tries < kMaxLost; ++tries) {
    try {
      const ExistingCheckpoint existing = read_existing(storage, format);
      if (!existing.found || !existing.save_id.empty()) return existing.save_id == save_id;
      // Where names are fixed, no file of a save is there before it is published.
      return format->has_fixed_names() && existing.files.contains(manifest_name(save_id));
    } catch (const Error& error) {
      log(LogLevel::kDebug, std::string("looking for a published checkpoint: ") + error.what());
    }
  }
  return false;
}

namespace {

// As in base/both_ways.h.
void walk_description(auto& io, auto& description) {
  both::text(io, description.format);
  both::text(io, description.dialect);
  both::blob(io, description.manifest);
  auto& files = description.files;
  both::table(io, files.contents, 2, [&](auto& bytes) { both::blob(io, bytes); });
  both::table(io, files.sizes, 2, [&](auto& size) { both::varint(io, size); });
  both::table(io, files.parts, 3, [&](auto& read) {
    both::varint(io, read.size);
    both::table(io, read.parts, 2, [&](auto& bytes) { both::blob(io, bytes); });
  });
}

void walk_replaced(auto& io, auto& replaced) {
  both::text(io, replaced.save_id);
  both::table(io, replaced.files, 9, [&](auto& hash) { both::u64(io, hash); });
}

}  // namespace

Bytes DescribingFiles::encode() const {
  ByteWriter writer;
  walk_description(writer, *this);
  return std::move(writer).take();
}

DescribingFiles DescribingFiles::decode(ByteView bytes) {
  ByteReader reader(bytes, "description of a checkpoint");
  DescribingFiles description;
  walk_description(reader, description);
  reader.expect_end();
  DirectoryFiles& files = description.files;
  for (const auto& [name, content] : files.contents) files.names.push_back(name);
  for (const auto& [name, size] : files.sizes) files.names.push_back(name);
  for (const auto& [name, read] : files.parts) files.names.push_back(name);
  std::sort(files.names.begin(), files.names.end());
  return description;
}

Bytes Replaced::encode() const {
  ByteWriter writer;
  walk_replaced(writer, *this);
  return std::move(writer).take();
}

Replaced Replaced::decode(ByteView bytes) {
  ByteReader reader(bytes, std::string(kReplacedName));
  Replaced replaced;
  walk_replaced(reader, replaced);
  reader.expect_end();
  return replaced;
}

}  // namespace tilestone::engine
