// Verifies data files. Every byte of a data file belongs to an item or to a gap. Items are checked
// against their checksums and for their inner structure. Gaps must be zero, with two exceptions:
// files in which bytes of removed items remain, and files of other writers (stock PyTorch leaves
// items there that no metadata names: replicas). The metadata and the manifest were checked when
// the checkpoint was opened.
#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "tilestone/base/block_sums.h"
#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/checkpoint/checkpoint_internal.h"
#include "tilestone/engine/checkpoint/repair_from_index_internal.h"
#include "tilestone/engine/checkpoint/verified_files_internal.h"
#include "tilestone/engine/checkpoint/verify_hashes_internal.h"
#include "tilestone/engine/checkpoint/verify_plan_internal.h"
#include "tilestone/engine/open/attempt_files_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/read/block_reads_internal.h"
#include "tilestone/engine/read/items_internal.h"
#include "tilestone/engine/read/objects_internal.h"
#include "tilestone/engine/read/payloads_internal.h"
#include "tilestone/engine/read/range_reader_internal.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/megatron_mark.h"

namespace tilestone::engine {
namespace {

using Kind = VerifyItem::Kind;

class Verifier {
 public:
  Verifier(const ReadContext& context, const Opened& opened, VerifiedFiles* shared)
      : context_(context),
        opened_(opened),
        shared_(shared == nullptr ? nullptr : &shared->state()),
        reader_(context, &context.threads),
        parts_(parts_of_files(opened)) {}

  VerifyReport run(const ProgressFn& fn) {
    open_files();
    plan_ = plan_verify(context_, sizes_, written_sizes(opened_), parts_,
                        opened_.common ? &*opened_.common : nullptr);
    std::move(plan_.damages.begin(), plan_.damages.end(), std::back_inserter(found_));
    check_manifest_is_there();
    check_dialect();
    check_file_hashes();
    if (shared_ != nullptr) leave_out_shared();
    ProgressMeter progress(fn, "verify", plan_.bytes);
    progress_ = &progress;
    read_ranges();
    context_.threads.parallel_for(plan_.alone.size(),
                                  [&](size_t i) { check_alone(plan_.alone[i]); });
    check_large();
    report_other_sums();
    check_block_sums();
    if (shared_ != nullptr) note_shared();
    progress.finish();
    return report(progress.seconds());
  }

 private:
  // A file that is missing or not a regular file is damage. A file that can't be opened (kIo), or
  // that a later save has removed (kNotFound), is an error.
  void open_files() {
    std::optional<uint32_t> missing;
    for (uint32_t file = 0; file < context_.metadata.files.size(); ++file) {
      const std::string& name = context_.metadata.files[file];
      int64_t size = kMissing;
      identities_.emplace_back();
      try {
        if (const auto info = context_.storage.stat(name)) {
          identities_.back() = info->identity;
          size = static_cast<int64_t>(reader_.open(file).size());
        } else {
          missing = file;
        }
      } catch (const Error& error) {
        if (error.code() == ErrorCode::kIo || error.code() == ErrorCode::kNotFound) throw;
        if (!is_missing(error)) {
          if (is_replaced()) throw;
          damage(name, 0, 0, "", error);
          size = kRefused;
        }
      }
      sizes_.push_back(size);
    }
    if (missing) expect_not_replaced(*missing);
  }

  // Looks once; that may read the whole index.
  bool is_replaced() {
    if (!replaced_) replaced_ = was_replaced(context_);
    return *replaced_;
  }

  // Throws if files are missing because a save has replaced the checkpoint. One look is enough for
  // all of them; it may read the whole index.
  void expect_not_replaced(uint32_t missing) {
    try {
      reader_.open(missing);
    } catch (const Error& error) {
      if (!is_missing(error)) throw;
    }
  }

  // Leaves out what was read of a shared file for another checkpoint, and takes what was found.
  void leave_out_shared() {
    std::set<uint32_t> known;  // items
    std::erase_if(plan_.ranges, [&](const VerifyRange& range) {
      const auto& file = identities_[range.file];
      if (!file || !shared_->knows(*file)) return false;
      if (range.item == VerifyRange::kGap) {
        const std::string& name = context_.metadata.files[range.file];
        if (!opened_.manifest || !opened_.manifest->remains.contains(name)) return false;
      } else {
        const VerifyItem& item = plan_.items[range.item];
        const std::string* const problem = shared_->find(*file, *item.at);
        if (problem == nullptr) return false;
        if (known.insert(range.item).second && !problem->empty()) {
          damage(item, 0, item.at->length, *problem);
        }
        plan_.expected.erase(range.item);
      }
      plan_.bytes -= range.end - range.begin;
      return true;
    });
  }

  void note_shared() {
    std::map<uint32_t, std::string> problems;  // by item
    for (const FoundDamage& found : found_) problems.emplace(found.item, found.damage.problem);
    for (uint32_t i = 0; i < plan_.items.size(); ++i) {
      const VerifyItem& item = plan_.items[i];
      const auto& file = identities_[item.at->file];
      if (file) shared_->add(*file, *item.at, problems[i]);
    }
    for (size_t file = 0; file < identities_.size(); ++file) {
      if (!identities_[file]) continue;
      shared_->name(*identities_[file],
                    context_.storage.describe() + "/" + context_.metadata.files[file]);
    }
  }

  // Reports data files with Tilestone names without the manifest of their save: the manifest is
  // missing, or the save id in the metadata is damaged. For a rank-local checkpoint, reports that a
  // rank's receipt is missing.
  void check_manifest_is_there() {
    if (opened_.manifest) return;
    const std::string& save_id = opened_.metadata.save_id;
    if (opened_.metadata.rank_local) {
      if (!is_save_id(save_id) || !read_head(context_.storage, save_id)) return;
      return damage(attempt_name(save_id), 0, 0, "",
                    "the receipt of a rank is missing, so data files were checked only against the "
                    "checksums in themselves");
    }
    const auto ours = std::find_if(context_.metadata.files.begin(), context_.metadata.files.end(),
                                   [&](const std::string& name) { return is_own_name(name); });
    if (ours == context_.metadata.files.end()) return;
    damage(opened_.files.contents.rbegin()->first, 0, 0, "",
           "Tilestone wrote this checkpoint, but the manifest of its save \"" +
               opened_.metadata.save_id + "\" is missing");
  }

  // Only in Megatron-Core's dialect: elsewhere a file of that name is another program's.
  void check_file_hashes() {
    if (opened_.dialect->mark() != kMegatronConfig) return;
    const std::string save_id = opened_.manifest ? opened_.manifest->save_id : std::string();
    for (Damage& one : check_hashes(context_.storage, save_id, context_.threads)) {
      found_.push_back({std::move(one)});
    }
  }

  // Checks the dialect's index files, and that all files exist that its writers always leave.
  void check_dialect() {
    const Dialect& dialect = *opened_.dialect;
    for (IndexFault& fault : dialect.verify_index(opened_.files)) {
      damage(fault.file, fault.offset, 0, "", std::move(fault.problem), fault.unsafe);
    }
    const std::string_view common = dialect.common_object();
    if (!common.empty() && !opened_.common &&
        !opened_.files.contents.contains(std::string(kMegatronCommon))) {
      damage(std::string(kMegatronCommon), 0, 0, std::string(common),
             "the common state is missing: neither this file nor an object contains it");
    }
    if (common.empty() && context_.metadata.writer.starts_with("Megatron-Core")) {
      const bool named = opened_.files.contents.contains(std::string(kMegatronConfig));
      damage(std::string(named ? kMegatronCommon : kMegatronConfig), 0, 0, "",
             "Megatron-Core wrote this checkpoint, but this file is missing or damaged");
    }
  }

  void damage(const std::string& file, uint64_t offset, uint64_t size, std::string key,
              std::string problem, bool unsafe = false) {
    std::lock_guard lock(mutex_);
    found_.push_back({{file, offset, size, std::move(key), std::move(problem), unsafe}});
  }
  void damage(const std::string& file, uint64_t offset, uint64_t size, std::string key,
              const Error& error) {
    damage(file, offset, size, std::move(key), error.message(), error.code() == ErrorCode::kUnsafe);
  }
  void damage(const VerifyItem& item, const Error& error) {
    damage(item, 0, item.at->length, error.message(), error.code() == ErrorCode::kUnsafe);
  }
  void damage(const VerifyItem& item, uint64_t within, uint64_t size, std::string problem,
              bool unsafe = false) {
    const auto number = static_cast<uint32_t>(&item - plan_.items.data());
    std::lock_guard lock(mutex_);
    found_.push_back({{context_.metadata.files[item.at->file], item.at->offset + within, size,
                       *item.key, std::move(problem), unsafe},
                      number});
  }

  // Completes the damages: whether a copy is damaged, and where the item is intact. For files that
  // are missing or too short, also lists what is lost with them.
  void look_for_copies() {
    for (const FoundDamage& found : found_) {
      if (found.item != VerifyRange::kGap) damaged_.insert(plan_.items[found.item].at);
    }
    const std::vector<std::string>& files = context_.metadata.files;
    for (auto& [damage, number, of_file] : found_) {
      if (number == VerifyRange::kGap) continue;
      const VerifyItem& item = plan_.items[number];
      damage.item_offset = item.at->offset;
      damage.copy = item.at != places_of(context_.metadata, item).front();
      if (const ItemLocation* intact = intact_place(item)) damage.intact_in = files[intact->file];
    }
    add_lost_keys();
  }

  // Adds the lost keys to the damages of files that are missing or too short.
  void add_lost_keys() {
    if (!opened_.has_manifest_file()) return;  // what is lost may be in another rank's chunk
    const std::map<std::string, uint64_t> written = written_sizes(opened_);
    std::map<std::string_view, std::set<std::string>> keys;  // by name of such a file
    for (size_t file = 0; file < sizes_.size(); ++file) {
      const std::string& name = context_.metadata.files[file];
      const auto size = written.find(name);
      if (size == written.end() || sizes_[file] == kRefused) continue;
      const bool is_short = sizes_[file] >= 0 && static_cast<uint64_t>(sizes_[file]) < size->second;
      if (sizes_[file] == kMissing || is_short) keys.try_emplace(name);
    }
    if (keys.empty()) return;
    FromIndex index(opened_);
    for (const VerifyItem& item : plan_.items) {
      const auto lost = keys.find(context_.metadata.files[item.at->file]);
      if (lost == keys.end() || is_in_index(index, item) || intact_place(item) != nullptr) continue;
      lost->second.insert(*item.key);
    }
    for (auto& [damage, number, of_file] : found_) {
      const auto lost = keys.find(damage.file);
      if (of_file && lost != keys.end()) damage.problem += text_of(lost->second);
    }
  }

  // Whether the index says all that the item holds, so that repair can encode it anew.
  bool is_in_index(FromIndex& index, const VerifyItem& item) const {
    if (item.kind == Kind::kTensor) {
      const StoredTensor& tensor = context_.metadata.tensors[item.chunk.tensor];
      return index.chunk(tensor, tensor.chunks[item.chunk.chunk], *item.at).has_value();
    }
    const bool is_common = opened_.common && item.object == &*opened_.common;
    return is_common && index.common(*item.at).has_value();
  }

  // A place where the item is intact; null: there is none.
  const ItemLocation* intact_place(const VerifyItem& item) const {
    for (const ItemLocation* at : places_of(context_.metadata, item)) {
      const int64_t size = sizes_[at->file];
      const bool there = size >= 0 && at->offset + at->length <= static_cast<uint64_t>(size);
      if (there && !damaged_.contains(at)) return at;
    }
    return nullptr;
  }

  static std::string text_of(const std::set<std::string>& lost_keys) {
    constexpr size_t kNamed = 5;
    if (lost_keys.empty()) {
      return "; everything that it should hold is intact (repair can rewrite the file)";
    }
    std::string text = "; without an intact copy: ";
    size_t named = 0;
    for (const std::string& key : lost_keys) {
      if (named == kNamed) break;
      text += (named++ > 0 ? ", " : "") + (key.empty() ? "the file's header or trailer" : key);
    }
    if (lost_keys.size() > kNamed) {
      text += " and " + std::to_string(lost_keys.size() - kNamed) + " more";
    }
    return text;
  }

  void read_ranges() {
    size_t first = 0;  // range of the batch
    const auto read_batch = [&] {
      const std::vector<ByteRange> done = reader_.read(
          [&](size_t i, ByteView bytes) {
            check_range(plan_.ranges[first + i], bytes);
            progress_->add(bytes.size());
          },
          [&](size_t i, const Error& error) { note_unreadable(plan_.ranges[first + i], error); });
      for (size_t i = 0; i < done.size(); ++i) {
        const VerifyRange& range = plan_.ranges[first + i];
        if (!range.summed) continue;
        RecordSum& sum = sums_[range.item];
        sum.add(sum.size(), done[i].size, done[i].crc32);
      }
      first += done.size();
    };
    for (const VerifyRange& range : plan_.ranges) {
      reader_.add({.file = range.file,
                   .begin = range.begin,
                   .size = range.end - range.begin,
                   .summed = range.summed});
      if (reader_.full()) read_batch();
    }
    read_batch();
  }

  // The disk can't read the range. An item of several ranges is reported once.
  void note_unreadable(const VerifyRange& range, const Error& error) {
    const std::string problem = unreadable_problem(error);
    if (range.item == VerifyRange::kGap) {
      return damage(context_.metadata.files[range.file], range.begin, range.end - range.begin, "",
                    problem + "; they belong to no item");
    }
    if (!unreadable_.insert(range.item).second) return;
    const VerifyItem& item = plan_.items[range.item];
    damage(item, 0, item.at->length, problem);
  }

  void check_range(const VerifyRange& range, ByteView bytes) {
    if (range.item != VerifyRange::kGap) {
      if (range.whole) check_item(plan_.items[range.item], bytes);
      return;
    }
    const std::string& name = context_.metadata.files[range.file];
    if (!opened_.manifest || opened_.manifest->remains.contains(name)) return;
    const auto found =
        std::find_if(bytes.begin(), bytes.end(), [](std::byte b) { return b != std::byte{0}; });
    if (found == bytes.end()) return;
    damage(name, range.begin + static_cast<uint64_t>(found - bytes.begin()),
           static_cast<uint64_t>(bytes.end() - found), "",
           "bytes that belong to no item are not zero; this damages no tensor or object");
  }

  void check_item(const VerifyItem& item, ByteView bytes) {
    const ItemLocation& at = *item.at;
    if (at.checksums && crc32(bytes) != at.checksums->item_crc32) {
      return note_other_sum(item, at.checksums->item_crc32, crc32(bytes));
    }
    if (at.codec == Codec::kNone) return check_structure(item, bytes);
    try {
      const Bytes decoded = context_.format.decode(at.codec, bytes, limit_of(item));
      check_structure(item, decoded);
    } catch (const Error& error) {
      damage(item, error);
    }
  }

  uint64_t limit_of(const VerifyItem& item) const {
    if (item.kind != Kind::kTensor) return decoded_limit(*item.at);
    const StoredTensor& tensor = context_.metadata.tensors[item.chunk.tensor];
    return decoded_limit(tensor, tensor.chunks[item.chunk.chunk]);
  }

  std::optional<ItemFault> verify_structure(const VerifyItem& item, ByteView bytes) const {
    if (item.kind == Kind::kObject) return context_.format.verify_object(bytes);
    const StoredTensor& tensor = context_.metadata.tensors[item.chunk.tensor];
    return context_.format.verify_tensor(tensor, tensor.chunks[item.chunk.chunk], bytes);
  }

  void check_structure(const VerifyItem& item, ByteView bytes) {
    if (item.kind == Kind::kFilePart) return;
    const bool decoded = item.at->codec != Codec::kNone;
    try {
      if (const auto fault = verify_structure(item, bytes)) {
        const uint64_t within = decoded ? 0 : std::min(fault->offset, item.at->length);
        return damage(item, within, item.at->length - within, fault->problem);
      }
      const bool is_object = item.kind == Kind::kObject;
      if (is_object && item.object->unsupported.empty()) {
        parse_object(opened_, bytes);
      } else if ((is_object || !payload_in(context_, item.chunk, bytes).record_crc32) &&
                 !item.at->checksums) {
        std::lock_guard lock(mutex_);
        ++unchecked_;
      }
    } catch (const Error& error) {
      damage(item, error);
    }
  }

  void check_alone(uint32_t index) {
    const VerifyItem& item = plan_.items[index];
    ReadContext raw = context_;
    raw.verify_checksums = false;
    ItemLocation at = *item.at;
    at.codec = Codec::kNone;
    try {
      check_item(item, read_item(raw, at, *item.key, at.length));
    } catch (const Error& error) {
      if (!is_unreadable(error)) throw;
      damage(item, 0, at.length, unreadable_problem(error));
    }
    progress_->add(at.length);
  }

  // Items larger than a buffer.
  void check_large() {
    for (const auto& [index, expected] : plan_.expected) {
      if (unreadable_.contains(index)) continue;
      const VerifyItem& item = plan_.items[index];
      const uint32_t found = sums_[index].crc32();
      if (found != expected) note_other_sum(item, expected, found);
    }
  }

  void note_other_sum(const VerifyItem& item, uint32_t expected, uint32_t found) {
    std::lock_guard lock(mutex_);
    other_sums_.push_back({&item, checksum_problem(expected, found)});
  }

  // Reports the items with another checksum. Where blocks have checksums, only the range of the
  // damaged blocks is reported.
  void report_other_sums() {
    for (const auto& [item, problem] : other_sums_) {
      const auto [begin, end] = damaged_range(*item);
      damage(*item, begin, end - begin, problem);
    }
  }

  // From the item's start, bytes. Reads the blocks once more.
  std::pair<uint64_t, uint64_t> damaged_range(const VerifyItem& item) const {
    const std::pair whole(uint64_t{0}, item.at->length);
    if (item.kind != Kind::kTensor || !item.at->checksums->blocks) return whole;
    try {
      const ChunkRef& at = item.chunk;
      const auto blocks = blocks_of(context_.metadata, at.tensor, at.chunk, at.copy);
      if (!blocks) return whole;
      const std::vector<uint64_t> bad = damaged_blocks(context_, at, *blocks);
      if (bad.empty()) return whole;
      return {blocks->begin + blocks->block_begin(bad.front()),
              blocks->begin + blocks->block_end(bad.back())};
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kCorrupt && !is_unreadable(error)) throw;
      return whole;
    }
  }

  // The recorded blocks must be those of the chunk, and their checksums must combine to that of the
  // payload.
  void check_block_sums() {
    for (const VerifyItem& item : plan_.items) {
      if (item.kind != Kind::kTensor || !item.at->checksums) continue;
      const ItemChecksums& sums = *item.at->checksums;
      if (sums.blocks && sums.blocks->combined() != sums.payload_crc32) {
        damage(item, 0, item.at->length,
               "the checksums of the item's blocks in the manifest contradict that of its payload");
      }
    }
  }

  static std::string checksum_problem(uint32_t expected, uint32_t found) {
    return "expected CRC-32 " + std::to_string(expected) + ", found " + std::to_string(found);
  }

  VerifyReport report(double seconds) {
    look_for_copies();
    std::vector<Damage> damages;
    for (FoundDamage& found : found_) damages.push_back(std::move(found.damage));
    std::sort(damages.begin(), damages.end(), [](const Damage& a, const Damage& b) {
      return std::tie(a.file, a.offset, a.key) < std::tie(b.file, b.offset, b.key);
    });
    VerifyReport report;
    report.files = plan_.files;
    report.items = plan_.items.size() - parts_.size();
    report.bytes = plan_.bytes;
    report.items_without_checksum = plan_.unchecked + unchecked_;
    report.damages = std::move(damages);
    report.short_files = std::move(plan_.short_files);
    std::sort(report.short_files.begin(), report.short_files.end(),
              [](const ShortFile& a, const ShortFile& b) { return a.file < b.file; });
    report.notes = context_.metadata.notes;
    report.seconds = seconds;
    return report;
  }

  struct OtherSum {
    const VerifyItem* item;
    std::string problem;
  };

  const ReadContext& context_;
  const Opened& opened_;
  VerifiedFiles::State* const shared_;  // null: other checkpoints don't count
  RangeReader reader_;
  std::vector<OtherSum> other_sums_;  // under mutex_
  std::optional<bool> replaced_;      // see is_replaced()
  std::vector<int64_t> sizes_;
  std::vector<std::optional<FileIdentity>> identities_;  // by file
  const std::vector<ItemLocation> parts_;
  VerifyPlan plan_;
  std::map<uint32_t, RecordSum> sums_;  // of large items
  std::set<uint32_t> unreadable_;       // items of which the disk can't read some range
  ProgressMeter* progress_ = nullptr;
  std::mutex mutex_;
  std::vector<FoundDamage> found_;
  std::set<const ItemLocation*> damaged_;  // items
  uint64_t unchecked_ = 0;
};

}  // namespace

VerifyReport verify_checkpoint(const ReadContext& context, const Opened& opened,
                               const ProgressFn& progress, VerifiedFiles* shared) {
  return Verifier(context, opened, shared).run(progress);
}

}  // namespace tilestone::engine

namespace tilestone {

bool VerifyReport::any_unsafe() const {
  return std::any_of(damages.begin(), damages.end(), [](const Damage& d) { return d.unsafe; });
}

}  // namespace tilestone
