#include <algorithm>
#include <set>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/thread_pool.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/run/resources_internal.h"
#include "tilestone/engine/write/stream_internal.h"
#include "tilestone/engine/write/writer_internal.h"

namespace tilestone::engine {
namespace {

// Bytes that surround a tensor's elements in a file, about. Large ones may begin anywhere in a
// page.
constexpr uint64_t kAroundTensor = 2u << 10;
constexpr uint64_t kAroundLarge = 6u << 10;
constexpr uint64_t kLarge = 1u << 20;

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

// What goes into one file: indices into the assignment's objects and chunks.
struct FileShare {
  std::vector<uint32_t> objects;
  std::vector<uint32_t> chunks;
  uint64_t bytes = 0;  // of tensors
};

class RankWriter {
 public:
  RankWriter(Storage& storage, const Format& format, const WriteTask& task,
             const SaveOptions& options, Deadline deadline)
      : storage_(storage),
        format_(format),
        task_(task),
        refs_(pieces_of(*task.items, *task.plan)),
        shares_(deal(static_cast<size_t>(std::max(1, options.files_per_rank)))),
        progress_(options.progress, "write", total_bytes()) {
    context_.buffers = make_pool(options.buffer_bytes, shares_.size(), total_bytes());
    context_.progress = &progress_;
    context_.deadline = deadline;
  }

  RankReport run() {
    report_.rank = task_.rank;
    report_.world_size = task_.world_size;
    report_.save_id = task_.save_id;
    report_.files.resize(shares_.size());
    for (size_t i = 0; i < shares_.size(); ++i) {
      report_.files[i].name =
          format_.data_file_name(task_.save_id, task_.rank, static_cast<int>(i));
    }
    describe_items();
    try {
      write_files();
      progress_.finish();
    } catch (...) {
      discard();
      throw;
    }
    return std::move(report_);
  }

 private:
  const Piece& piece(uint32_t chunk) const {
    const PieceRef ref = refs_[chunk];
    return task_.items->tensors[ref.item].pieces[ref.piece];
  }

  // Objects go to the first file, whose tensors then start after them; tensors by bytes, each to
  // the file that has least. Files that would stay empty are not made.
  std::vector<FileShare> deal(size_t files) const {
    std::vector<FileShare> shares(files);
    for (uint32_t i = 0; i < task_.assignment.objects.size(); ++i) shares[0].objects.push_back(i);
    for (uint32_t i = 0; i < task_.assignment.chunks.size(); ++i) {
      auto least = std::min_element(
          shares.begin(), shares.end(),
          [](const FileShare& a, const FileShare& b) { return a.bytes < b.bytes; });
      least->chunks.push_back(i);
      least->bytes += std::max<uint64_t>(1, piece(task_.assignment.chunks[i]).data.bytes());
    }
    std::erase_if(shares, [](const FileShare& s) { return s.objects.empty() && s.chunks.empty(); });
    return shares;
  }

  uint64_t total_bytes() const {
    uint64_t bytes = 0;
    for (uint32_t chunk : task_.assignment.chunks) bytes += piece(chunk).data.bytes();
    return bytes;
  }

  // Of the file, about: what there must be room for.
  uint64_t expected_bytes(const FileShare& share) const {
    uint64_t bytes = share.bytes;
    for (uint32_t i : share.chunks) {
      const uint64_t of_tensor = piece(task_.assignment.chunks[i]).data.bytes();
      bytes += of_tensor < kLarge ? kAroundTensor : kAroundLarge;
    }
    return bytes;
  }

  // Everything of the report that is known before the bytes are written.
  void describe_items() {
    std::unordered_map<std::string_view, uint32_t> known;
    const auto describe = [&](const TensorItem& item) {
      const auto next = static_cast<uint32_t>(report_.tensors.size());
      const auto [found, is_new] = known.try_emplace(item.key, next);
      if (is_new) {
        report_.tensors.push_back({item.key, item.path, item.dtype, item.global_shape});
      }
      return found->second;
    };
    report_.chunks.resize(task_.assignment.chunks.size());
    for (size_t i = 0; i < report_.chunks.size(); ++i) {
      const PieceRef ref = refs_[task_.assignment.chunks[i]];
      report_.chunks[i].tensor = describe(task_.items->tensors[ref.item]);
      report_.chunks[i].box = task_.items->tensors[ref.item].pieces[ref.piece].box;
    }
    for (const TensorItem& item : task_.items->tensors) {
      const bool without_elements = numel(item.global_shape) == 0;
      // Of ranks that are known to hold the same, the first one speaks for all.
      const bool speaks = item.holders.empty() || item.holders.front() == task_.rank;
      const bool unsure = task_.report_held && speaks;
      if (!item.pieces.empty() && (without_elements || unsure)) describe(item);
    }
    report_.objects.resize(task_.assignment.objects.size());
    for (size_t i = 0; i < report_.objects.size(); ++i) {
      const ObjectItem& object = task_.items->objects[task_.assignment.objects[i]];
      report_.objects[i].key = object.key;
      report_.objects[i].path = object.path;
    }
  }

  void write_files() {
    std::set<std::string> directories{""};
    for (const ReportedFile& file : report_.files) {
      const size_t slash = file.name.rfind('/');
      if (slash == std::string::npos) continue;
      directories.insert(file.name.substr(0, slash));
      storage_.make_directory(file.name.substr(0, slash));
    }
    if (shares_.size() == 1) {
      write_file(0);
    } else if (!shares_.empty()) {
      ThreadPool threads(shares_.size() - 1);
      threads.parallel_for(shares_.size(), [&](size_t index) { write_file(index); });
    }
    if (shares_.empty()) return;
    for (const std::string& directory : directories) storage_.sync_directory(directory);
  }

  void write_file(size_t index) {
    const FileShare& share = shares_[index];
    const auto file = storage_.create(report_.files[index].name, expected_bytes(share));
    FileStream stream(*file, context_);
    const auto encoder = format_.encoder();
    for (uint32_t i : share.objects) {
      const ObjectItem& object = task_.items->objects[task_.assignment.objects[i]];
      write_item(index, stream, report_.objects[i].at, object.key,
                 [&](uint64_t at) { return encoder->object(object, at); });
    }
    for (uint32_t i : share.chunks) {
      const uint32_t chunk = task_.assignment.chunks[i];
      const TensorItem& item = task_.items->tensors[refs_[chunk].item];
      write_item(index, stream, report_.chunks[i].at, item.key,
                 [&](uint64_t at) { return encoder->tensor(item, piece(chunk), at); });
    }
    stream.finish();
    file->sync(context_.deadline);
    file->close();
    report_.files[index].size = stream.position();
  }

  template <typename Encode>
  void write_item(size_t file, FileStream& stream, ReportedItem& at, const std::string& key,
                  const Encode& encode) {
    if (context_.deadline.expired()) {
      throw Error(ErrorCode::kTimeout, "the deadline passed while writing").with_key(key);
    }
    try {
      const ItemRecipe recipe = encode(stream.position());
      at.file = static_cast<uint32_t>(file);
      at.offset = stream.position() + recipe.padding;
      at.length = recipe.length;
      at.checksums = stream.write(recipe);
    } catch (...) {
      throw current_error().with_key(key);
    }
  }

  void discard() {
    std::vector<std::string> names;
    for (const ReportedFile& file : report_.files) names.push_back(file.name);
    remove_files(storage_, names);
  }

  Storage& storage_;
  const Format& format_;
  const WriteTask& task_;
  const std::vector<PieceRef> refs_;
  const std::vector<FileShare> shares_;
  ProgressMeter progress_;
  StreamContext context_;
  RankReport report_;
};

}  // namespace

RankReport write_items(Storage& storage, const Format& format, const WriteTask& task,
                       const SaveOptions& options, Deadline deadline) {
  return RankWriter(storage, format, task, options, deadline).run();
}

}  // namespace tilestone::engine
