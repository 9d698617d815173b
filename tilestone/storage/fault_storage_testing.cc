#include "tilestone/storage/fault_storage_testing.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <set>
#include <thread>

#include "tilestone/base/error.h"
#include "tilestone/storage/child_storage_testing.h"
#include "tilestone/storage/directories.h"
#include "tilestone/storage/fault_journal_testing.h"
#include "tilestone/storage/names_internal.h"

namespace tilestone {

std::string_view to_string(StorageOp op) {
  static constexpr std::string_view kNames[] = {"create",
                                                "append",
                                                "sync",
                                                "close",
                                                "open",
                                                "read",
                                                "stat",
                                                "list",
                                                "rename",
                                                "link",
                                                "put",
                                                "remove",
                                                "make_directory",
                                                "remove_directory",
                                                "rename_directory",
                                                "exchange_directories",
                                                "settle",
                                                "lock"};
  return kNames[static_cast<size_t>(op)];
}

std::string_view to_string(Survival survival) {
  static constexpr std::string_view kNames[] = {
      "all",       "no_unsynced_data",    "zeroed_data",      "torn_512",
      "torn_4096", "no_unsynced_entries", "nothing_unsynced", "random"};
  return kNames[static_cast<size_t>(survival)];
}

bool changes_storage(StorageOp op) {
  return op != StorageOp::kOpen && op != StorageOp::kRead && op != StorageOp::kStat &&
         op != StorageOp::kList;
}

struct FaultDisk::State {
  std::shared_ptr<Storage> inner;
  std::shared_ptr<MemoryStorage> memory;  // inner if it is a memory_storage(), else null
  FaultHook hook;
  std::atomic<uint64_t> calls = 0;
  std::atomic<bool> crashed = false;
  mutable std::mutex mutex;
  std::unique_ptr<FaultJournal> journal;  // null if memory is null
  std::atomic<bool> no_exchange = false;
  std::shared_ptr<Storage> listed;  // what listings show; null: what is there
  std::set<int> dead;               // clients
  std::multimap<int, std::weak_ptr<std::unique_ptr<StorageClaim>>> locks;  // by client
  std::multimap<uint64_t, std::function<void()>> late;  // by the index of the call that it precedes

  [[noreturn]] void fail_dead(std::string_view name) const {
    throw Error(ErrorCode::kIo, crashed ? "the machine is dead (simulated crash)"
                                        : "the process is dead (simulated kill)")
        .with_file(name);
  }

  // The caller must hold mutex.
  void expect_alive(const StorageCall& call) const {
    if (crashed || dead.contains(call.client)) fail_dead(call.name);
  }
  FaultAction decide(StorageCall call);
  // Executes what is due before the call with this index.
  void execute_late(uint64_t index);
  void conclude(const StorageCall& call, const FaultAction& action);
  // Asks the hook what to do with the call; runs `work` or skips it accordingly.
  template <typename Work>
  void perform(const StorageCall& call, const Work& work);
};

// Counts the call and asks the hook. Throws if the machine or the client is dead.
FaultAction FaultDisk::State::decide(StorageCall call) {
  {
    std::lock_guard lock(mutex);
    expect_alive(call);
  }
  call.index = calls.fetch_add(1);
  execute_late(call.index);
  const FaultAction action = hook ? hook(call) : FaultAction::pass();
  if (action.delay.count() > 0) std::this_thread::sleep_for(action.delay);
  return action;
}

void FaultDisk::State::execute_late(uint64_t index) {
  const std::lock_guard lock(mutex);
  while (!late.empty() && late.begin()->first <= index) {
    const auto work = late.extract(late.begin());
    if (crashed) continue;
    try {
      work.mapped()();
    } catch (const Error&) {
      // Nobody waits for the answer.
    }
  }
}

bool comes_late(StorageOp op) {
  return op == StorageOp::kRename || op == StorageOp::kPut || op == StorageOp::kRemove ||
         op == StorageOp::kRenameDirectory || op == StorageOp::kExchangeDirectories;
}

// Ends a call after its work as the action says: returns, fails, or kills the client or machine.
void FaultDisk::State::conclude(const StorageCall& call, const FaultAction& action) {
  using Then = FaultAction::Then;
  if (action.then == Then::kGoOn) return;
  if (action.then == Then::kFail) {
    const ErrorCode code = action.error == ENOTSUP  ? ErrorCode::kUnsupported
                           : action.error == ENOENT ? ErrorCode::kNotFound
                                                    : ErrorCode::kIo;
    throw Error(code, "cannot " + std::string(to_string(call.op)) +
                          " (injected): " + std::strerror(action.error))
        .with_file(call.name)
        .with_errno(action.error);
  }
  std::lock_guard lock(mutex);
  if (action.then == Then::kCrash) {
    crashed = true;
  } else {
    dead.insert(call.client);
    const auto [begin, end] = locks.equal_range(call.client);
    for (auto it = begin; it != end; ++it) {
      if (const auto held = it->second.lock()) held->reset();
    }
    locks.erase(begin, end);
  }
  fail_dead(call.name);
}

template <typename Work>
void FaultDisk::State::perform(const StorageCall& call, const Work& work) {
  const FaultAction action = decide(call);
  const bool looks_only = !changes_storage(call.op) || call.op == StorageOp::kLock;
  if (action.kind == FaultAction::Kind::kLate && comes_late(call.op)) {
    std::lock_guard lock(mutex);
    expect_alive(call);
    late.emplace(calls + action.later - 1, work);
  }
  const bool twice = action.kind == FaultAction::Kind::kTwice;
  const bool done = action.kind == FaultAction::Kind::kDo || twice ||
                    (action.then == FaultAction::Then::kGoOn && looks_only);
  if (done) {
    try {
      std::lock_guard lock(mutex);
      expect_alive(call);  // the client may have died while this call was delayed
      work();
      if (twice && call.op != StorageOp::kLock) work();
    } catch (...) {
      if (action.then != FaultAction::Then::kFail) conclude(call, action);
      throw;
    }
  }
  conclude(call, action);
}

class FaultWritable : public WritableFile {
 public:
  // `inner` is null if the creation was dropped. `file` is null over storage that is not memory.
  FaultWritable(std::shared_ptr<FaultDisk> disk, int client, std::string name,
                std::unique_ptr<WritableFile> inner, std::shared_ptr<MemoryFile> file)
      : disk_(std::move(disk)),
        client_(client),
        name_(std::move(name)),
        inner_(std::move(inner)),
        file_(std::move(file)) {}

  void append(Buffer buffer) override { append(buffer.view()); }

  void append(ByteView bytes) override {
    FaultDisk::State& state = *disk_->state_;
    const StorageCall call{
        0, client_, StorageOp::kAppend, name_, "", size_, static_cast<uint64_t>(bytes.size())};
    const FaultAction action = state.decide(call);
    if (inner_ != nullptr) {
      std::lock_guard lock(state.mutex);
      state.expect_alive(call);
      if (action.kind == FaultAction::Kind::kDo || action.kind == FaultAction::Kind::kTwice) {
        inner_->append(bytes);
      } else if (action.kind == FaultAction::Kind::kTear) {
        inner_->append(bytes.first(std::min<uint64_t>(action.keep, bytes.size())));
      } else if (action.then == FaultAction::Then::kGoOn) {
        inner_->append(Bytes(bytes.size()));
      }
    }
    state.conclude(call, action);
    size_ += bytes.size();
  }

  void sync(Deadline deadline) override {
    call(StorageOp::kSync, [&](FaultDisk::State& state) {
      inner_->sync(deadline);
      if (file_ != nullptr) state.journal->synced(file_);
    });
  }

  void close() override {
    call(StorageOp::kClose, [&](FaultDisk::State&) { inner_->close(); });
  }

  uint64_t size() const override { return size_; }
  const std::string& name() const override { return name_; }

 private:
  template <typename Work>
  void call(StorageOp op, const Work& work) {
    FaultDisk::State& state = *disk_->state_;
    state.perform({0, client_, op, name_, "", 0, 0}, [&] {
      if (inner_ != nullptr) work(state);
    });
  }

  std::shared_ptr<FaultDisk> disk_;
  int client_;
  std::string name_;
  std::unique_ptr<WritableFile> inner_;
  std::shared_ptr<MemoryFile> file_;
  uint64_t size_ = 0;
};

// A lock that is released when its holder dies (simulated).
class FaultLock : public StorageClaim {
 public:
  explicit FaultLock(std::shared_ptr<std::unique_ptr<StorageClaim>> inner)
      : inner_(std::move(inner)) {}
  Deadline held_until(const Deadline& deadline) override {
    return *inner_ == nullptr ? Deadline::after(std::chrono::seconds(0))
                              : (*inner_)->held_until(deadline);
  }

 private:
  std::shared_ptr<std::unique_ptr<StorageClaim>> inner_;
};

class FaultDirectories : public Directories {
 public:
  FaultDirectories(FaultDisk::State& state, int client) : state_(state), client_(client) {}

  void make(const std::string& name) override {
    state_.perform({0, client_, StorageOp::kMakeDirectory, name, "", 0, 0}, [&] {
      inner().make(name);
      if (state_.journal) state_.journal->made_directory(name);
    });
  }
  void remove(const std::string& name) override {
    state_.perform({0, client_, StorageOp::kRemoveDirectory, name, "", 0, 0}, [&] {
      inner().remove(name);
      if (state_.journal) state_.journal->removed(name);
    });
  }
  void settle(const std::string& name) override {
    state_.perform({0, client_, StorageOp::kSettle, name, "", 0, 0}, [&] {
      inner().settle(name);
      if (state_.journal) state_.journal->synced_directory(name);
    });
  }
  bool can_exchange() override { return !state_.no_exchange && inner().can_exchange(); }
  void exchange(const std::string& a, const std::string& b) override {
    if (state_.no_exchange) {
      throw Error(ErrorCode::kUnsupported, "the disk does not support this (simulated)")
          .with_file(a);
    }
    state_.perform({0, client_, StorageOp::kExchangeDirectories, a, b, 0, 0},
                   [&state = state_, a, b] {
                     state.inner->directories()->exchange(a, b);
                     if (state.journal) state.journal->exchanged(a, b);
                   });
    sync_parents(a, b);
  }
  void rename(const std::string& from, const std::string& to) override {
    state_.perform({0, client_, StorageOp::kRenameDirectory, from, to, 0, 0},
                   [&state = state_, from, to] {
                     state.inner->directories()->rename(from, to);
                     if (state.journal) state.journal->renamed(from, to);
                   });
    sync_parents(from, to);
  }
  void rename_file(const std::string& from, const std::string& to, bool replace) override {
    state_.perform({0, client_, StorageOp::kRename, from, to, 0, 0},
                   [&state = state_, from, to, replace] {
                     state.inner->rename(from, to, replace);
                     if (state.journal) state.journal->renamed(from, to);
                   });
  }
  void copy_permissions(const std::string&, const std::string&) override {}

 private:
  Directories& inner() { return *state_.inner->directories(); }
  void sync_parents(const std::string& a, const std::string& b) {
    settle(std::string(parent_name(a)));
    if (parent_name(a) != parent_name(b)) settle(std::string(parent_name(b)));
  }

  FaultDisk::State& state_;
  int client_;
};

class FaultStorage : public Storage {
 public:
  FaultStorage(std::shared_ptr<FaultDisk> disk, int client)
      : disk_(std::move(disk)),
        state_(*disk_->state_),
        client_(client),
        directories_(state_, client) {}

  StorageFacts facts() const override {
    StorageFacts facts = state_.inner->facts();
    if (facts.directories != nullptr) facts.directories = &directories_;
    return facts;
  }

  std::unique_ptr<WritableFile> create(const std::string& name, uint64_t expected_size,
                                       const Deadline& deadline) override {
    std::unique_ptr<WritableFile> inner;
    std::shared_ptr<MemoryFile> file;
    state_.perform(call(StorageOp::kCreate, name), [&] {
      inner = state_.inner->create(name, expected_size, deadline);
      if (state_.memory == nullptr) return;
      file = state_.memory->find(name);
      state_.journal->made_directory(std::string(parent_name(name)));
      state_.journal->created(name, file);
    });
    return std::make_unique<FaultWritable>(disk_, client_, name, std::move(inner), std::move(file));
  }

  std::unique_ptr<ReadableFile> open(const std::string& name) override {
    std::unique_ptr<ReadableFile> file;
    state_.perform(call(StorageOp::kOpen, name), [&] { file = state_.inner->open(name); });
    return file;
  }

  void read(std::span<const ReadOp> ops, const ReadOptions& options,
            const ReadDone& done) override {
    for (const ReadOp& op : ops) {
      const std::string_view name = op.file == nullptr ? "" : std::string_view(op.file->name());
      state_.perform({0, client_, StorageOp::kRead, name, "", op.offset, op.size}, [] {});
    }
    state_.inner->read(ops, options, done);
  }

  std::optional<FileInfo> stat(const std::string& name) override {
    std::optional<FileInfo> info;
    state_.perform(call(StorageOp::kStat, name), [&] { info = state_.inner->stat(name); });
    return info;
  }

  Listing listing(const std::string& prefix, Depth depth) override {
    // No call of a file system.
    const bool is_of_stores = depth == Depth::kAtOnce || depth == Depth::kUnfinished;
    if (is_of_stores && directories() != nullptr) return {};
    Listing found;
    state_.perform(call(StorageOp::kList, prefix), [&] {
      found = (state_.listed ? state_.listed : state_.inner)->listing(prefix, depth);
    });
    return found;
  }

  std::optional<std::string> put_for_tag(const std::string& name, ByteView bytes,
                                         const Condition& condition, const std::string& scratch,
                                         Deadline deadline) override {
    if (directories() != nullptr) {
      return Storage::put_for_tag(name, bytes, condition, scratch, deadline);
    }
    // All of it outlives this call. Of two executions the first counts: the client of a store
    // recognises its own bytes.
    const auto done = std::make_shared<std::optional<bool>>();
    state_.perform(call(StorageOp::kPut, name),
                   [=, &state = state_, kept = Bytes(bytes.begin(), bytes.end())] {
                     const bool put = state.inner->put(name, kept, condition, scratch, deadline);
                     *done = put || done->value_or(false);
                   });
    return done->value_or(true) ? std::optional<std::string>("") : std::nullopt;
  }

  std::shared_ptr<Storage> view(const std::string& directory,
                                const std::optional<Deadline>&) override {
    return directory.empty() ? shared_from_this() : child_storage(shared_from_this(), directory);
  }

  bool remove_files(std::span<const std::string> names, const FileRemoval& how) override {
    if (how.unfinished) return state_.inner->remove_files(names, how);
    if (how.if_tag && directories() == nullptr) return remove_one(names.front(), how);
    for_each_name(names, [&](const std::string& each) {
      state_.perform(call(StorageOp::kRemove, each), [&state = state_, name = each] {
        const bool is_there = state.memory != nullptr && state.memory->find(name) != nullptr;
        state.inner->remove(name);
        if (is_there) state.journal->removed(name);
      });
    });
    return true;
  }

  bool link(const StorageEntry& from, const std::string& name, const Deadline& deadline) override {
    StorageEntry entry = without_children(from);
    if (const auto* const other = dynamic_cast<const FaultStorage*>(entry.storage.get())) {
      entry.storage = other->state_.inner;
    }
    bool done = true;
    state_.perform({0, client_, StorageOp::kLink, entry.name, name, 0, 0}, [&] {
      done = state_.inner->link(entry, name, deadline);
      if (!done || state_.journal == nullptr) return;
      state_.journal->made_directory(std::string(parent_name(name)));
      state_.journal->created(name, state_.memory->find(name));
    });
    return done;
  }

  std::unique_ptr<StorageClaim> claim(const std::string& name, const Deadline& patience) override {
    auto held = std::make_shared<std::unique_ptr<StorageClaim>>();
    state_.perform(call(StorageOp::kLock, name), [&] {
      const bool existed = state_.memory == nullptr || state_.memory->find(name) != nullptr;
      *held = state_.inner->claim(name, patience);
      if (!existed && state_.journal != nullptr) {
        state_.journal->made_directory(std::string(parent_name(name)));
        state_.journal->created(name, state_.memory->find(name));
      }
      if (*held != nullptr) state_.locks.emplace(client_, held);
    });
    if (*held == nullptr) return nullptr;
    return std::make_unique<FaultLock>(std::move(held));
  }

  bool is_claimed(const std::string& name) override {
    bool locked = false;
    state_.perform(call(StorageOp::kStat, name), [&] { locked = state_.inner->is_claimed(name); });
    return locked;
  }

 private:
  StorageCall call(StorageOp op, const std::string& name) const {
    return {0, client_, op, name, "", 0, 0};
  }

  std::shared_ptr<FaultDisk> disk_;
  FaultDisk::State& state_;
  int client_;
  bool remove_one(const std::string& name, const FileRemoval& how) {
    const auto done = std::make_shared<bool>(true);
    state_.perform(call(StorageOp::kRemove, name),
                   [=, &state = state_] { *done = state.inner->remove_files({&name, 1}, how); });
    return *done;
  }

  mutable FaultDirectories directories_;
};

FaultDisk::FaultDisk(std::shared_ptr<Storage> inner, FaultHook hook)
    : state_(std::make_unique<State>()) {
  state_->inner = std::move(inner);
  state_->hook = std::move(hook);
  if (state_->inner->directories() != nullptr) {
    state_->memory = std::dynamic_pointer_cast<MemoryStorage>(state_->inner);
  }
  if (state_->memory != nullptr) {
    state_->journal = std::make_unique<FaultJournal>(*state_->memory);
  }
}

FaultDisk::~FaultDisk() = default;

std::shared_ptr<FaultDisk> FaultDisk::create(std::shared_ptr<Storage> inner, FaultHook hook) {
  return std::shared_ptr<FaultDisk>(new FaultDisk(std::move(inner), std::move(hook)));
}

std::shared_ptr<Storage> FaultDisk::storage(int client) {
  return std::make_shared<FaultStorage>(shared_from_this(), client);
}

void FaultDisk::take_away_exchange() { state_->no_exchange = true; }

void FaultDisk::lag_listings(FileImage earlier) {
  const std::lock_guard lock(state_->mutex);
  const bool in_files = state_->inner->directories() != nullptr;
  state_->listed =
      in_files ? memory_storage(std::move(earlier)) : memory_objects(std::move(earlier));
}

void FaultDisk::execute_late() { state_->execute_late(UINT64_MAX); }

uint64_t FaultDisk::calls() const { return state_->calls; }

bool FaultDisk::crashed() const { return state_->crashed; }

FileImage FaultDisk::surviving_image(Survival survival, uint64_t seed) const {
  std::lock_guard lock(state_->mutex);
  if (state_->journal == nullptr) return memory_image(*state_->inner);
  return state_->journal->surviving_image(survival, seed);
}

}  // namespace tilestone
