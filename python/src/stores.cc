// Object stores that are implemented in Python: a tilestone.Store, which has one function for each
// thing that the engine does with a store. They are called with the GIL, from any thread, several
// at a time; all else runs without it.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>

#include "python/src/bindings.h"
#include "tilestone/base/error.h"
#include "tilestone/base/thread_pool.h"
#include "tilestone/storage/lease.h"
#include "tilestone/storage/names_internal.h"
#include "tilestone/storage/object_store.h"
#include "tilestone/storage/read_only.h"
#include "tilestone/storage/read_ops_internal.h"
#include "tilestone/storage/storage.h"

namespace tilestone::python {
namespace {

using nb::literals::operator""_a;

constexpr uint64_t kPartBytes = 8u << 20;  // of one write, and of one get of a larger range

// The functions of a tilestone.Store.
struct StoreCalls {
  std::shared_ptr<const void> kept;  // keeps the rest alive
  nb::handle stat, listing, get, put, create, remove;
  bool has_tags;
  std::string prefix = {};  // of the names: "", or that of a directory, "a/b/"

  explicit StoreCalls(nb::handle store)
      : kept(keep_alive(store)),
        stat(of(store, "stat")),
        listing(of(store, "listing")),
        get(of(store, "get")),
        put(of(store, "put")),
        create(of(store, "create")),
        remove(of(store, "remove")),
        has_tags(nb::cast<bool>(store.attr("has_tags"))) {}
  StoreCalls(const StoreCalls& above, const std::string& name) : StoreCalls(above) {
    prefix += name + "/";
  }

  nb::object text(const std::string& name) const { return python_text(prefix + name); }

  // A field of a frozen dataclass stays as long as the object.
  static nb::handle of(nb::handle store, const char* name) {
    return nb::object(store.attr(name)).ptr();
  }
};

Error error_from(const nb::python_error& raised, const std::string& call, const std::string& name) {
  const Raised kept(raised);
  if (kept.ends_the_program()) return error_of(raised, call);
  const bool is_none = raised.matches(PyExc_FileNotFoundError);
  Error error(is_none ? ErrorCode::kNotFound : ErrorCode::kIo,
              "the store's " + call + " raised " + kept.what());
  if (is_none) error.with_errno(ENOENT);
  return error.with_file(name);
}

// Runs `work` with the GIL. `call` and `name` say in errors what was done with which file.
template <typename Work>
auto in_store(const char* call, const std::string& name, const Deadline& deadline, Work&& work) {
  if (deadline.expired()) {
    throw Error(ErrorCode::kTimeout, std::string("the deadline passed before the store's ") + call)
        .with_file(name);
  }
  std::optional<std::invoke_result_t<Work&>> result;
  run_in_python_here([&] {
    try {
      result.emplace(work());
    } catch (const nb::python_error& raised) {
      throw error_from(raised, call, name);
    } catch (const std::bad_cast&) {
      throw Error(ErrorCode::kInvalidArgument,
                  std::string("the store's ") + call + " returned an object of another type")
          .with_file(name);
    }
  });
  return *std::move(result);
}

// Of a Python object with a buffer, as long as this exists. Needs the GIL.
class Borrowed {
 public:
  explicit Borrowed(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  ~Borrowed() { PyBuffer_Release(&buffer_); }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;
  ByteView view() const {
    return {static_cast<const std::byte*>(buffer_.buf), static_cast<size_t>(buffer_.len)};
  }

 private:
  Py_buffer buffer_;
};

// Fills `target` with what is at `offset`.
void get_range(const StoreCalls& calls, const std::string& name, const std::string& tag,
               uint64_t offset, MutableByteView target, const Deadline& deadline) {
  const size_t found = in_store("get", name, deadline, [&] {
    const nb::object got = calls.get(calls.text(name), offset, target.size(), python_text(tag));
    const Borrowed bytes(got);
    const nb::gil_scoped_release released;
    if (bytes.view().size() == target.size())
      std::memcpy(target.data(), bytes.view().data(), target.size());
    return bytes.view().size();
  });
  if (found == target.size()) return;
  throw Error(ErrorCode::kCorrupt, "the store's get returned " + std::to_string(found) +
                                       " bytes at offset " + std::to_string(offset) +
                                       " instead of " + std::to_string(target.size()))
      .with_file(name);
}

std::optional<FileInfo> stat_of(const StoreCalls& calls, const std::string& name,
                                const Deadline& deadline) {
  return in_store("stat", name, deadline, [&]() -> std::optional<FileInfo> {
    const nb::object found = calls.stat(calls.text(name));
    if (found.is_none()) return std::nullopt;
    auto [size, modified, tag] =
        nb::cast<std::tuple<uint64_t, std::optional<double>, std::string>>(found);
    return FileInfo{.size = size, .modified = modified, .tag = std::move(tag)};
  });
}

// Whether a put that was refused has been done before, and its answer was lost. Nobody else puts
// the same bytes; but a file may be created twice with the same.
bool holds(const StoreCalls& calls, const std::string& name, ByteView bytes,
           const Deadline& deadline) {
  const auto found = stat_of(calls, name, deadline);
  if (!found || bytes.empty() || found->size != bytes.size()) return false;
  Bytes there(bytes.size());
  get_range(calls, name, found->tag, 0, there, deadline);
  return std::ranges::equal(there, bytes);
}

// `tag`: as that of Store.put. False: its condition does not hold.
bool put_whole(const StoreCalls& calls, const std::string& name, ByteView bytes,
               const std::optional<std::string>& tag, const Deadline& deadline) {
  return in_store("put", name, deadline, [&] {
    const nb::object condition = tag ? nb::object(python_text(*tag)) : nb::object(nb::none());
    return nb::cast<bool>(calls.put(calls.text(name), python_bytes(bytes), condition));
  });
}

// A small file is put in one call, a larger one through the store's writer.
class StoreWriter : public WritableFile {
 public:
  StoreWriter(std::shared_ptr<const StoreCalls> calls, std::string name, Deadline deadline)
      : calls_(std::move(calls)), name_(std::move(name)), deadline_(std::move(deadline)) {}

  void append(Buffer buffer) override { append(buffer.view()); }
  void append(ByteView bytes) override {
    expect_open();
    size_ += bytes.size();
    while (!bytes.empty()) {
      if (part_.empty() && bytes.size() >= kPartBytes) {
        write_part(bytes.first(kPartBytes));
        bytes = bytes.subspan(kPartBytes);
        continue;
      }
      const size_t count = std::min<uint64_t>(bytes.size(), kPartBytes - part_.size());
      part_.insert(part_.end(), bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(count));
      bytes = bytes.subspan(count);
      if (part_.size() == kPartBytes) write_collected();
    }
  }
  void sync(Deadline deadline) override {
    expect_open();
    deadline_ = std::move(deadline);
    finish();
  }
  void close() override {
    expect_open();
    if (!finished_) finish();
    open_ = false;
  }
  uint64_t size() const override { return size_; }
  const std::string& name() const override { return name_; }

 private:
  void expect_open() const {
    if (!open_) throw Error(ErrorCode::kInvalidArgument, "the file is closed").with_file(name_);
  }

  void write_part(ByteView part) {
    in_store("create", name_, deadline_, [&] {
      if (writer_ == nullptr) writer_ = keep_alive(calls_->create(calls_->text(name_)));
      kept_object(writer_).attr("write")(python_bytes(part));
      return true;
    });
  }
  void write_collected() {
    write_part(part_);
    part_.clear();
  }

  void finish() {
    finished_ = true;
    if (writer_ == nullptr ? put_whole(*calls_, name_, part_, "", deadline_) : finish_parts())
      return;
    throw Error(ErrorCode::kAlreadyExists, "cannot create a file")
        .with_file(name_)
        .with_errno(EEXIST);
  }

  // Stores have no condition for the end of such an upload, so one looks before it.
  bool finish_parts() {
    if (stat_of(*calls_, name_, deadline_)) return false;
    if (!part_.empty()) write_collected();
    return in_store("close", name_, deadline_, [&] {
      kept_object(writer_).attr("close")();
      return true;
    });
  }

  const std::shared_ptr<const StoreCalls> calls_;
  const std::string name_;
  Deadline deadline_;
  Bytes part_;
  std::shared_ptr<const void> writer_;  // null: no part is written yet
  uint64_t size_ = 0;
  bool finished_ = false, open_ = true;
};

class StoreReadable : public ReadableFile {
 public:
  StoreReadable(std::shared_ptr<const StoreCalls> its_calls, std::string name, FileInfo info)
      : calls(std::move(its_calls)),
        tag(std::move(info.tag)),
        name_(std::move(name)),
        size_(info.size) {}
  uint64_t size() const override { return size_; }
  const std::string& name() const override { return name_; }

  const std::shared_ptr<const StoreCalls> calls;
  const std::string tag;

 private:
  const std::string name_;
  const uint64_t size_;
};

// The ops of one read, in pieces that run at the same time.
class StoreReads {
 public:
  StoreReads(std::span<const ReadOp> ops, const ReadOptions& options, const ReadDone& done)
      : ops_(ops), options_(options), done_(done), left_(ops.size()) {
    for (size_t i = 0; i < ops.size(); ++i) {
      left_[i] = ops[i].size;
      // An op without a target fits into one buffer.
      const uint64_t step =
          ops[i].target == nullptr ? std::max<uint64_t>(ops[i].size, 1) : kPartBytes;
      uint64_t at = 0;
      do {
        pieces_.push_back({i, at, std::min(step, ops[i].size - at)});
        at += step;
      } while (at < ops[i].size);
    }
  }

  void run() {
    const auto one = [this](size_t index) { get(pieces_[index]); };
    if (options_.threads != nullptr) return options_.threads->parallel_for(pieces_.size(), one);
    for (size_t index = 0; index < pieces_.size(); ++index) one(index);
  }

 private:
  struct Piece {
    size_t op;
    uint64_t offset, size;  // in the op
  };

  void get(const Piece& piece) {
    const ReadOp& op = ops_[piece.op];
    Buffer buffer;
    if (op.target == nullptr && op.size > 0) buffer = options_.buffers->acquire(options_.deadline);
    std::byte* const target = buffer ? buffer.data() : op.target;
    const auto& file = static_cast<const StoreReadable&>(*op.file);
    if (piece.size > 0) {
      get_range(*file.calls, file.name(), file.tag, op.offset + piece.offset,
                {target + piece.offset, piece.size}, options_.deadline);
    }
    if (left_[piece.op].fetch_sub(piece.size) > piece.size) return;
    set_checksums(op, {target, op.size});
    done_(piece.op, {target, op.size});
  }

  const std::span<const ReadOp> ops_;
  const ReadOptions& options_;
  const ReadDone& done_;
  std::vector<Piece> pieces_;
  std::vector<std::atomic<uint64_t>> left_;  // bytes of each op
};

class PythonStore : public Storage {
 public:
  PythonStore(std::string url, std::shared_ptr<const StoreCalls> calls)
      : url_(std::move(url)), calls_(std::move(calls)) {
    while (url_.ends_with('/')) url_.pop_back();
  }

  StorageFacts facts() const override {
    StorageFacts facts = {.description = url_};
    facts.costs_requests = true;
    facts.read_costs = kStoreReadCosts;
    facts.put_if_tag = calls_->has_tags;
    if (calls_->has_tags) facts.lease_period = lease_period();
    return facts;
  }

  std::unique_ptr<WritableFile> create(const std::string& name, uint64_t,
                                       const Deadline& deadline) override {
    check_file_name(name);
    return std::make_unique<StoreWriter>(calls_, name, deadline);
  }

  std::unique_ptr<ReadableFile> open(const std::string& name) override {
    check_file_name(name);
    auto info = stat_of(*calls_, name, Deadline::never());
    if (!info) {
      throw Error(ErrorCode::kNotFound, "cannot open a file").with_file(name).with_errno(ENOENT);
    }
    return std::make_unique<StoreReadable>(calls_, name, *std::move(info));
  }

  void read(std::span<const ReadOp> ops, const ReadOptions& options,
            const ReadDone& done) override {
    for (const ReadOp& op : ops) {
      const auto* const file = dynamic_cast<const StoreReadable*>(op.file);
      check_read_op(op, options, file != nullptr && file->calls->kept == calls_->kept);
    }
    StoreReads(ops, options, done).run();
  }

  std::optional<FileInfo> stat(const std::string& name) override {
    check_file_name(name);
    auto info = stat_of(*calls_, name, Deadline::never());
    if (info && !calls_->has_tags) info->tag.clear();
    return info;
  }

  Listing listing(const std::string& prefix, Depth depth) override {
    if (depth == Depth::kAtOnce || depth == Depth::kUnfinished) return {};
    using Files = std::vector<std::tuple<std::string, uint64_t, std::optional<double>>>;
    auto [listed, directories] = in_store("listing", prefix, Deadline::never(), [&] {
      return nb::cast<std::pair<Files, std::vector<std::string>>>(
          calls_->listing(calls_->text(prefix), depth == Depth::kTree));
    });
    const size_t above = calls_->prefix.size();
    std::map<std::string, FileInfo> files;
    for (auto& [name, size, modified] : listed) {
      name.erase(0, above);
      if (is_file_name(name)) files[name] = {.size = size, .modified = modified};
    }
    Listing found;
    for (auto& [name, info] : files) {
      found.files.push_back(name);
      found.infos.push_back(std::move(info));
    }
    for (std::string& name : directories) name.erase(0, above);
    std::ranges::sort(directories);
    found.directories = std::move(directories);
    return found;
  }

  std::optional<std::string> put_for_tag(const std::string& name, ByteView bytes,
                                         const Condition& condition, const std::string&,
                                         Deadline deadline) override {
    check_file_name(name);
    std::optional<std::string> tag;
    if (!condition.is_always()) tag = condition.tag();
    const bool done = put_whole(*calls_, name, bytes, tag, deadline) ||
                      (tag && holds(*calls_, name, bytes, deadline));
    return done ? std::optional<std::string>("") : std::nullopt;
  }

  bool remove_files(std::span<const std::string> names, const FileRemoval& how) override {
    if (names.empty() || how.unfinished) return true;
    for (const std::string& name : names) check_file_name(name);
    if (how.if_tag && calls_->has_tags) {
      const auto found = stat_of(*calls_, names.front(), how.deadline.value_or(Deadline::never()));
      if (!found || found->tag != *how.if_tag) return !found;
    }
    in_store("remove", names.front(), Deadline::never(), [&] {
      nb::list all;
      for (const std::string& name : names) all.append(calls_->text(name));
      calls_->remove(all);
      return true;
    });
    return true;
  }

  std::shared_ptr<Storage> view(const std::string& directory,
                                const std::optional<Deadline>&) override {
    if (directory.empty()) return shared_from_this();
    return std::make_shared<PythonStore>(url_ + "/" + directory,
                                         std::make_shared<StoreCalls>(*calls_, directory));
  }

  std::unique_ptr<StorageClaim> claim(const std::string& name, const Deadline& patience) override {
    check_file_name(name);
    if (calls_->has_tags) return claim_lease(shared_from_this(), name, lease_period(), patience);
    throw Error(ErrorCode::kUnsupported, "a store without tags has no leases").with_file(name);
  }
  bool is_claimed(const std::string& name) override {
    if (calls_->has_tags) return is_leased(*this, name, lease_period());
    return stat(name) && claim(name, Deadline::never()) != nullptr;
  }

 private:
  std::string url_;
  std::shared_ptr<const StoreCalls> calls_;
};

void register_python_store(const std::string& scheme, nb::handle open) {
  const std::shared_ptr<const void> kept = keep_alive(open);
  register_store(scheme, [kept](const std::string& url) {
    return in_store("opening", url, Deadline::never(), [&] {
      const nb::object store = kept_object(kept)(python_text(url));
      return std::make_shared<PythonStore>(url, std::make_shared<StoreCalls>(store));
    });
  });
}

}  // namespace

void bind_stores(nb::module_& m) {
  m.def("register_store", &register_python_store, "scheme"_a, "open"_a,
        nb::sig("def register_store(scheme: str, open: collections.abc.Callable[[str], object])"
                " -> None"),
        "As tilestone.register_store. `open` returns a tilestone.Store.");
}

}  // namespace tilestone::python
