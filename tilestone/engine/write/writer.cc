#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/base/host.h"
#include "tilestone/base/thread_pool.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/run/inventory.h"
#include "tilestone/engine/run/resources_internal.h"
#include "tilestone/engine/write/new_files_internal.h"
#include "tilestone/engine/write/reuse_internal.h"
#include "tilestone/engine/write/stream_internal.h"
#include "tilestone/engine/write/writer_internal.h"
#include "tilestone/format/data_file_name.h"
#include "tilestone/plan/held.h"

namespace tilestone::engine {
namespace {

// Approximate number of bytes around a tensor's elements in a file. Large tensors may need padding
// up to an offset within a page.
constexpr uint64_t kAroundTensor = 2u << 10;
constexpr uint64_t kAroundLarge = 6u << 10;
constexpr uint64_t kLarge = 1u << 20;
// Files of unchanged chunks: so many of a rank, of so many bytes at least. Chunks that are next to
// each other in the state tend to change together.
constexpr uint64_t kApartFiles = 16;
constexpr uint64_t kLeastOfApart = 64u << 20;
// Of several chunks in one file. An object store copies at most 5 GiB.
constexpr uint64_t kMostOfApart = uint64_t{4} << 30;

// A tensor item's piece, as a chunk of the local plan numbers it.
struct PieceRef {
  uint32_t item = 0;
  uint32_t piece = 0;
};

std::vector<PieceRef> pieces_of(const Items& items, const LocalSavePlan& plan) {
  std::vector<PieceRef> refs;
  refs.reserve(plan.chunks.size());
  for (uint32_t item = 0; item < items.tensors.size(); ++item) {
    for (uint32_t piece = 0; piece < items.tensors[item].pieces.size(); ++piece) {
      refs.push_back({item, piece});
    }
  }
  if (refs.size() != plan.chunks.size()) {
    throw Error(ErrorCode::kInternal, "the local plan has " + std::to_string(plan.chunks.size()) +
                                          " chunks for " + std::to_string(refs.size()) + " pieces");
  }
  return refs;
}

// The contents of one file: indices into the assignment's objects followed by its object copies,
// and into its chunks followed by its copies.
struct FileShare {
  std::string name = {};    // set for an item with a file of its own; "" for the rank's data files
  std::string prefix = {};  // of a data file's name: SaveOptions::separation_hint, or ""
  std::vector<uint32_t> objects = {};
  std::vector<uint32_t> chunks = {};
  uint64_t bytes = 0;  // of tensors
  bool apart = false;  // of unchanged chunks, which later checkpoints may share
};

// The earlier checkpoint of which nothing is written again; null: none.
const Location* reused(const SaveOptions& options) {
  if (options.reuse) return &*options.reuse;
  return options.step != nullptr ? options.step->reuse.get() : nullptr;
}

class RankWriter {
 public:
  RankWriter(Storage& storage, const Format& format, const WriteTask& task,
             const SaveOptions& options, Deadline deadline)
      : storage_(storage),
        format_(format),
        task_(task),
        options_(options),
        attributes_(options.tensor_attributes),
        hint_(options.separation_hint),
        copies_(options.copies.has_value()),
        refs_(pieces_of(*task.items, *task.plan)),
        next_file_(task.first_file),
        progress_(options.progress, "write", total_bytes()) {
    context_.progress = &progress_;
    context_.deadline = deadline;
  }

  Receipt run() {
    receipt_.rank = task_.rank;
    receipt_.world_size = task_.world_size;
    receipt_.save_id = task_.save_id;
    receipt_.host = host_name();
    try {
      if (const Location* const earlier = reused(options_)) reuse(*earlier);
      prepare_files();
      describe_items();
      write_files();
      progress_.finish();
    } catch (...) {
      discard();
      throw;
    }
    // Orders the parts by file, so that the receipt does not depend on the threads.
    std::stable_sort(receipt_.parts.begin(), receipt_.parts.end(),
                     [](const auto& a, const auto& b) { return a.file < b.file; });
    return std::move(receipt_);
  }

 private:
  size_t threads() const { return thread_count(options_.resources.threads); }

  // Deals the items over files, and names these.
  void prepare_files() {
    shares_ = deal(static_cast<size_t>(std::max(1, options_.resources.files_per_rank)));
    const size_t data_files = static_cast<size_t>(std::count_if(
        shares_.begin(), shares_.end(), [](const FileShare& share) { return share.name.empty(); }));
    streams_ = std::min(shares_.size(), files_at_once(std::max(data_files, threads())));
    const uint64_t memory = options_.resources.buffer_bytes;
    context_.buffers = task_.kept != nullptr ? task_.kept->buffers(memory, streams_, total_bytes())
                                             : make_pool(memory, streams_, total_bytes());
    prepare_fetching(memory);
    for (const FileShare& share : shares_) {
      const std::string& name = share.name;
      receipt_.files.push_back({name.empty() ? share.prefix + next_name() : name, 0});
      receipt_.files.back().steps = share.apart ? 1 : 0;
    }
    receipt_.files.insert(receipt_.files.end(), links_.begin(), links_.end());
  }

  std::string next_name() { return data_file_name(task_.save_id, task_.rank, next_file_++); }

  // ---- Chunks that an earlier checkpoint has

  // Compares them, and links the files that the checkpoints will share.
  void reuse(const Location& location) {
    if (format_.files_have_headers() || format_.has_fixed_names() || !hint_.empty()) {
      log_once(LogLevel::kWarning, "files of the format " + std::string(format_.name()) +
                                       " are not shared between checkpoints: reuse is ignored");
      return;
    }
    const auto earlier = EarlierStep::read(location, task_.rank, context_.deadline);
    if (!earlier) return;
    reusable_.resize(chunk_count());
    const auto encoder = format_.encoder();
    for (uint32_t i = 0; i < chunk_count(); ++i) {
      const uint32_t chunk = chunk_at(i);
      reusable_[i].data = &piece(chunk).data;
      if (piece(chunk).data.bytes() < kLeastReused) continue;
      const TensorItem& tensor = task_.items->tensors[refs_[chunk].item];
      auto found = earlier->find(tensor.key, tensor.dtype, tensor.global_shape, piece(chunk).box,
                                 i >= task_.assignment.chunks.size());
      if (found && is_alike(*encoder, tensor, piece(chunk), found->at)) {
        reusable_[i].earlier = std::move(found);
      }
    }
    std::shared_ptr<ThreadPool> pool;
    if (threads() > 1) {
      pool = task_.kept != nullptr ? task_.kept->threads(threads())
                                   : std::make_shared<ThreadPool>(threads());
    }
    streams_ = 1;
    prepare_fetching(options_.resources.buffer_bytes);
    choose_ways(reusable_, *earlier, total_bytes(), pool.get(), fetching_.get(), context_.deadline);
    link_files(*earlier);
  }

  // Whether the save would write the item in this form around the tensor's bytes.
  static bool is_alike(ItemEncoder& encoder, const TensorItem& tensor, const Piece& piece,
                       const ReceiptItem& at) {
    const ItemRecipe recipe = encoder.tensor(tensor, piece, at.offset);
    return recipe.length == at.length && recipe.payload_offset == at.checksums.payload_offset;
  }

  // What can't be linked is written.
  void link_files(const EarlierStep& earlier) {
    std::map<uint32_t, std::optional<uint32_t>> links;  // file -> its number in links_
    for (ReusableChunk& chunk : reusable_) {
      if (chunk.way != Way::kLinked) continue;
      const auto [link, is_new] = links.try_emplace(chunk.earlier->file);
      if (is_new) link->second = link_file(earlier, link->first);
      if (!link->second) {
        chunk.way = Way::kApart;
        continue;
      }
      chunk.earlier->file = *link->second;
      progress_.add(chunk.data->bytes());
    }
  }

  std::optional<uint32_t> link_file(const EarlierStep& earlier, uint32_t file) {
    const std::string name = data_file_name(task_.save_id, task_.rank, next_file_);
    // By files a restarted rank may have left it; a store would replace it.
    if (options_.by_files && storage_.stat(name)) {
      throw Error(ErrorCode::kAlreadyExists, "cannot link a file").with_file(name);
    }
    if (!earlier.link(file, storage_, name, context_.deadline)) return std::nullopt;
    note_made(name);
    ++next_file_;
    const ReceiptFile& known = earlier.files()[file];
    links_.push_back({name, known.size, known.steps + 1});
    return static_cast<uint32_t>(links_.size() - 1);
  }

  Way way_of(uint32_t i) const { return reusable_.empty() ? Way::kWritten : reusable_[i].way; }

  // ---- The assignment

  // Access to the assignment's chunks and, after these, its copies.
  uint32_t chunk_count() const {
    return static_cast<uint32_t>(task_.assignment.chunks.size() + task_.assignment.copies.size());
  }
  uint32_t chunk_at(uint32_t i) const {
    const std::vector<uint32_t>& chunks = task_.assignment.chunks;
    return i < chunks.size() ? chunks[i] : task_.assignment.copies[i - chunks.size()];
  }
  Receipt::Chunk& reported(uint32_t i) {
    const size_t chunks = receipt_.chunks.size();
    return i < chunks ? receipt_.chunks[i] : receipt_.copies[i - chunks];
  }

  // The same for objects.
  uint32_t object_count() const {
    return static_cast<uint32_t>(task_.assignment.objects.size() +
                                 task_.assignment.object_copies.size());
  }
  uint32_t object_at(uint32_t i) const {
    const std::vector<uint32_t>& objects = task_.assignment.objects;
    return i < objects.size() ? objects[i] : task_.assignment.object_copies[i - objects.size()];
  }
  const ObjectItem& object(uint32_t i) const { return task_.items->objects[object_at(i)]; }
  Receipt::Object& reported_object(uint32_t i) {
    const size_t objects = receipt_.objects.size();
    return i < objects ? receipt_.objects[i] : receipt_.object_copies[i - objects];
  }

  const Piece& piece(uint32_t chunk) const {
    const PieceRef ref = refs_[chunk];
    return task_.items->tensors[ref.item].pieces[ref.piece];
  }

  static FileShare& least_full(std::span<FileShare> files) {
    return *std::min_element(
        files.begin(), files.end(),
        [](const FileShare& a, const FileShare& b) { return a.bytes < b.bytes; });
  }

  // Distributes the items over files. An item for which the format names a file goes there. Other
  // objects go to the first data file, before its tensors. Each tensor chunk goes to the file
  // with the fewest bytes so far. Keys that begin with the hint have as many files of their own.
  // Files that would stay empty are not made.
  std::vector<FileShare> deal(size_t files) const {
    std::vector<FileShare> shares(hint_.empty() ? files : 2 * files);
    for (size_t i = files; i < shares.size(); ++i) shares[i].prefix = hint_;
    const auto files_for = [&](const std::string& key) {
      const bool separate = !hint_.empty() && key.starts_with(hint_);
      return std::span(shares).subspan(separate ? files : 0, files);
    };
    std::vector<FileShare> named;
    std::unordered_map<std::string, size_t> named_at;
    const auto file_named = [&](const std::string& name) -> FileShare& {
      const auto [at, is_new] = named_at.emplace(name, named.size());
      if (is_new) named.push_back({.name = name});
      return named[at->second];
    };
    for (uint32_t i = 0; i < object_count(); ++i) {
      if (const auto own = format_.separate_file(object(i))) {
        file_named(*own).objects.push_back(i);
      } else {
        files_for(object(i).key).front().objects.push_back(i);
      }
    }
    for (uint32_t i = 0; i < chunk_count(); ++i) {
      if (way_of(i) != Way::kWritten) continue;
      const uint32_t chunk = chunk_at(i);
      const uint64_t bytes = std::max<uint64_t>(1, piece(chunk).data.bytes());
      const TensorItem& tensor = task_.items->tensors[refs_[chunk].item];
      const auto own = format_.separate_file(tensor, piece(chunk));
      FileShare& share = own ? file_named(*own) : least_full(files_for(tensor.key));
      share.chunks.push_back(i);
      share.bytes += bytes;
    }
    std::erase_if(shares, [](const FileShare& s) { return s.objects.empty() && s.chunks.empty(); });
    std::move(named.begin(), named.end(), std::back_inserter(shares));
    deal_apart(shares);
    return shares;
  }

  // The unchanged chunks that are not linked, in the order of the state.
  void deal_apart(std::vector<FileShare>& shares) const {
    uint64_t total = 0;
    for (const ReusableChunk& chunk : reusable_) {
      if (chunk.way == Way::kApart) total += chunk.data->bytes();
    }
    const uint64_t enough = std::max(kLeastOfApart, total / kApartFiles);
    FileShare share{.apart = true};
    for (uint32_t i = 0; i < reusable_.size(); ++i) {
      if (way_of(i) != Way::kApart) continue;
      const uint64_t bytes = reusable_[i].data->bytes();
      if (share.bytes > 0 && share.bytes + bytes > kMostOfApart) {
        shares.push_back(std::exchange(share, {.apart = true}));
      }
      share.chunks.push_back(i);
      share.bytes += bytes;
      if (share.bytes >= enough) shares.push_back(std::exchange(share, {.apart = true}));
    }
    if (!share.chunks.empty()) shares.push_back(std::move(share));
  }

  // The pinned buffers through which tensors come from devices.
  void prepare_fetching(uint64_t total) {
    uint64_t bytes = 0;
    const DeviceMemory* device = nullptr;
    for (uint32_t i = 0; i < chunk_count(); ++i) {
      const TensorView& data = piece(chunk_at(i)).data;
      if (data.device == nullptr) continue;
      device = data.device.get();
      bytes += data.bytes();
    }
    if (device == nullptr) return;
    fetching_ =
        task_.kept != nullptr
            ? task_.kept->pinned_buffers(total, streams_, FetchAhead::kPerStream, bytes, *device)
            : make_pinned_pool(total, streams_, FetchAhead::kPerStream, bytes, *device);
  }

  uint64_t total_bytes() const {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < chunk_count(); ++i) bytes += piece(chunk_at(i)).data.bytes();
    return bytes;
  }

  // The approximate size of the file, for preallocation.
  uint64_t expected_bytes(const FileShare& share) const {
    uint64_t bytes = share.bytes;
    for (uint32_t i : share.chunks) {
      const uint64_t of_tensor = piece(chunk_at(i)).data.bytes();
      bytes += of_tensor < kLarge ? kAroundTensor : kAroundLarge;
    }
    return bytes;
  }

  // Fills in the parts of the receipt that are known before the bytes are written.
  void describe_items() {
    std::unordered_map<std::string_view, uint32_t> known;
    const size_t tensors = std::min<size_t>(chunk_count(), task_.items->tensors.size());
    known.reserve(tensors);
    receipt_.tensors.reserve(tensors);
    const auto describe = [&](const TensorItem& item) {
      const auto next = static_cast<uint32_t>(receipt_.tensors.size());
      const auto [found, is_new] = known.try_emplace(item.key, next);
      if (is_new) {
        receipt_.tensors.push_back(
            {item.key, item.path, item.dtype, item.global_shape, item.order});
      }
      return found->second;
    };
    receipt_.chunks.resize(task_.assignment.chunks.size());
    receipt_.copies.resize(task_.assignment.copies.size());
    for (uint32_t i = 0; i < chunk_count(); ++i) {
      const PieceRef ref = refs_[chunk_at(i)];
      reported(i).tensor = describe(task_.items->tensors[ref.item]);
      reported(i).box = task_.items->tensors[ref.item].pieces[ref.piece].box;
      if (way_of(i) != Way::kLinked) continue;
      reported(i).at = reusable_[i].earlier->at;
      reported(i).at.file = static_cast<uint32_t>(shares_.size()) + reusable_[i].earlier->file;
    }
    for (const TensorItem& item : task_.items->tensors) {
      const bool without_elements = numel(item.global_shape) == 0;
      // If the holders are known, only the first one reports the tensor.
      const bool receipts = item.holders.empty() || item.holders.front() == task_.rank;
      const bool held = task_.list_held && receipts;
      const auto attributes = attributes_.empty() ? attributes_.end() : attributes_.find(item.key);
      if (attributes != attributes_.end()) receipt_.attributes[describe(item)] = attributes->second;
      // `held`: also if this rank has no chunk, so that a tensor of which no rank has one is
      // missed.
      if (held || (without_elements && !item.pieces.empty())) describe(item);
    }
    receipt_.dict_keys = task_.items->dict_keys;
    if (task_.list_held) receipt_.held = held_by_rule(*task_.plan, task_.world_size);
    describe_objects();
  }

  // Reports the objects' content hashes if there are copies, to find equal ones, or if the ranks
  // plan by rule, so that a restarted rank can compare them.
  void describe_objects() {
    receipt_.objects.resize(task_.assignment.objects.size());
    receipt_.object_copies.resize(task_.assignment.object_copies.size());
    for (uint32_t i = 0; i < object_count(); ++i) {
      Receipt::Object& described = reported_object(i);
      described.key = object(i).key;
      described.path = object(i).path;
      described.order = object(i).order;
      if (copies_ || task_.list_held) described.content = task_.plan->objects[object_at(i)].content;
    }
  }

  void write_files() {
    FileParents directories;
    for (const ReceiptFile& file : receipt_.files) directories.add_parents_of(file.name);
    if (streams_ == 1) {
      for (size_t index = 0; index < shares_.size(); ++index) write_file(index);
    } else if (!shares_.empty()) {
      const auto threads = task_.kept != nullptr ? task_.kept->threads(streams_)
                                                 : std::make_shared<ThreadPool>(streams_);
      threads->parallel_for(shares_.size(), [&](size_t index) { write_file(index); });
    }
    if (!receipt_.files.empty()) directories.sync(storage_, static_cast<int>(streams_));
  }

  void write_file(size_t index) {
    const FileShare& share = shares_[index];
    const auto file =
        storage_.create(receipt_.files[index].name, expected_bytes(share), context_.deadline);
    note_made(receipt_.files[index].name);
    FileStream stream(*file, context_, fetched_by(share));
    const auto encoder = format_.encoder();
    if (format_.files_have_headers()) begin_file(index, stream, *encoder);
    each_item(share, [&](const FileItem& item, ReceiptItem& at) {
      write_item(index, stream, *encoder, item, at);
    });
    stream.finish();
    file->sync(context_.deadline);
    file->close();
    receipt_.files[index].size = stream.position();
    if (share.apart) note_hashes(share);
  }

  // Of the chunks whose bytes are still those that were hashed.
  void note_hashes(const FileShare& share) {
    for (const uint32_t i : share.chunks) {
      ReceiptItem& at = reported(i).at;
      const ItemChecksums& hashed = reusable_[i].earlier->at.checksums;
      if (at.checksums.payload_crc32 == hashed.payload_crc32) at.hash = reusable_[i].hash;
    }
  }

  FetchAhead fetched_by(const FileShare& share) {
    std::vector<FetchedTensor> fetched;
    for (uint32_t i : share.chunks) {
      const uint32_t chunk = chunk_at(i);
      const TensorView& data = piece(chunk).data;
      if (data.device == nullptr || data.bytes() == 0) continue;
      fetched.push_back({&data, &task_.items->tensors[refs_[chunk].item].key});
    }
    return {std::move(fetched), fetching_, context_.deadline};
  }

  // Calls `visit` for each item that write_file() writes, in that order, with the item's place in
  // the receipt.
  template <typename Visit>
  void each_item(const FileShare& share, const Visit& visit) {
    for (uint32_t i : share.objects) {
      visit(FileItem{nullptr, nullptr, &object(i)}, reported_object(i).at);
    }
    for (uint32_t i : share.chunks) {
      const uint32_t chunk = chunk_at(i);
      const TensorItem& item = task_.items->tensors[refs_[chunk].item];
      visit(FileItem{&item, &piece(chunk), nullptr}, reported(i).at);
    }
  }

  void begin_file(size_t index, FileStream& stream, ItemEncoder& encoder) {
    std::vector<FileItem> items;
    each_item(shares_[index],
              [&](const FileItem& item, const ReceiptItem&) { items.push_back(item); });
    const Bytes bytes = encoder.begin_file(items);
    Receipt::FilePart part{static_cast<uint32_t>(index), stream.position(), bytes.size(), 0};
    part.crc32 = stream.write(ByteView(bytes));
    std::lock_guard lock(parts_mutex_);
    receipt_.parts.push_back(part);
  }

  void write_item(size_t file, FileStream& stream, ItemEncoder& encoder, const FileItem& item,
                  ReceiptItem& at) {
    const std::string& key = item.object != nullptr ? item.object->key : item.tensor->key;
    with_key(key, [&] {
      if (context_.deadline.expired()) {
        throw Error(ErrorCode::kTimeout, "the deadline passed while writing");
      }
      const ItemRecipe recipe = item.object != nullptr
                                    ? encoder.object(*item.object, stream.position())
                                    : encoder.tensor(*item.tensor, *item.piece, stream.position());
      at.file = static_cast<uint32_t>(file);
      at.offset = stream.position() + recipe.padding;
      at.length = recipe.length;
      at.checksums = stream.write(recipe);
    });
  }

  void note_made(const std::string& name) {
    std::lock_guard lock(parts_mutex_);
    made_.push_back(name);
  }

  // Removes only files that this rank made. A name that existed before belongs to another program.
  // In an object store that shows only when the file is whole.
  void discard() {
    const Error why = current_error();
    if (why.code() == ErrorCode::kAlreadyExists) std::erase(made_, why.file());
    task_.discard ? task_.discard(made_) : void(remove_files(storage_, made_));
  }

  Storage& storage_;
  const Format& format_;
  const WriteTask& task_;
  const SaveOptions& options_;
  const std::map<std::string, Attributes>& attributes_;  // by key
  const std::string& hint_;                              // SaveOptions::separation_hint
  const bool copies_;                                    // ranks also write copies of shards
  const std::vector<PieceRef> refs_;
  int next_file_;                        // the number of the next data file
  std::vector<ReusableChunk> reusable_;  // by chunk, as chunk_at() numbers them; empty: none is
  std::vector<ReceiptFile> links_;  // a linked chunk's EarlierItem::file is an index into these
  std::vector<FileShare> shares_;
  size_t streams_ = 0;  // files that are written at the same time
  ProgressMeter progress_;
  StreamContext context_;
  std::shared_ptr<BufferPool> fetching_;  // null: no tensor is in device memory
  std::mutex parts_mutex_;
  std::vector<std::string> made_;  // names of files; guarded by parts_mutex_ during writing
  Receipt receipt_;                // its parts: likewise
};

}  // namespace

Receipt write_items(Storage& storage, const Format& format, const WriteTask& task,
                    const SaveOptions& options, Deadline deadline) {
  return RankWriter(storage, format, task, options, deadline).run();
}

}  // namespace tilestone::engine
